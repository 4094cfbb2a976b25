"""Sums, concatenations and exchanges of rows over the ranks of a stage that is on several hosts: first within each
host, by the collective of its ranks, then between hosts, over the encrypted connections of host_links.py.

A rank exchanges what its host has with the ranks in the same place on the other hosts. Every rank adds up the hosts'
parts in their order, so that a sum has the same bits on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from ratoon.distributed.host_links import HostLinks
from ratoon.layers.shard import Collective

Tensor = torch.Tensor


class HostCollective(Collective):
    can_be_captured = False  # what is sent passes through host memory
    can_be_recorded = False

    def __init__(
        self, links: HostLinks, own: Collective | None, rank: int, num_ranks: int, num_local_ranks: int
    ) -> None:
        """`own`: the collective of this host's ranks of the stage, `num_local_ranks` of `num_ranks`; None: there is one
        of them. `rank`: of this one in the stage."""
        self._links = links
        self._own = own
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_local_ranks = num_local_ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x if self._own is None else self._own.all_reduce(x)
        first, *others = self._links.exchange(x)
        total = first.clone()
        for part in others:
            total += part
        return total

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        width = -(-size // self._num_ranks)  # the last ranks may have fewer columns than the others
        x = functional.pad(x, (0, width - x.shape[1]))
        x = x if self._own is None else self._own.all_gather(x, width * self._num_local_ranks)
        return torch.cat(self._links.exchange(x), dim=1)[:, :size]

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """Rows for a rank of another host go by the rank of this host that has the same place."""
        size, own_place = self._num_local_ranks, self._rank % self._num_local_ranks
        places, hosts = range(size), range(self._num_ranks // size)
        here = [counts[self._rank - own_place + place] for place in places]  # of the ranks of this host
        parts = x.split(list(counts[self._rank]))  # by target
        x = torch.cat([parts[host * size + place] for place in places for host in hosts])
        if self._own is not None:
            x = self._own.all_to_all(x, [[sum(of_rank[place::size]) for place in places] for of_rank in here])
        of_hosts = [list(of_rank[own_place::size]) for of_rank in here]  # rows for this place on each host
        by_source = [rows.split(sizes) for rows, sizes in zip(x.split(list(map(sum, of_hosts))), of_hosts, strict=True)]
        to_hosts = [torch.cat([of_source[host] for of_source in by_source]) for host in hosts]
        taken = [sum(counts[host * size + place][self._rank] for place in places) for host in hosts]
        return torch.cat(self._links.exchange_rows(to_hosts, taken))
