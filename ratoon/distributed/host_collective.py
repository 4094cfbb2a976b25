"""Sums and concatenations over the ranks of a stage that is on several hosts: first within each host, by the collective
of its ranks, then between hosts, over the encrypted connections of host_links.py.

A rank exchanges what its host has with the ranks in the same place on the other hosts. Every rank adds up the hosts'
parts in their order, so that a sum has the same bits on all of them.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ratoon.distributed.host_links import HostLinks
from ratoon.layers.shard import Collective

Tensor = torch.Tensor


class HostCollective(Collective):
    can_be_captured = False  # what is sent passes through host memory
    can_be_recorded = False

    def __init__(self, links: HostLinks, own: Collective | None, num_ranks: int, num_local_ranks: int) -> None:
        """`own`: the collective of this host's ranks of the stage, `num_local_ranks` of `num_ranks`; None: there is one
        of them."""
        self._links = links
        self._own = own
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
