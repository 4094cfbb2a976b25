"""How results of experts come together by all-to-all, where each of several ranks has some of the experts whole.

All ranks have all rows of a step, before a layer and behind it. By all-reduce each rank routes all rows and sends a
result for each, also for those that none of its experts has got. Here each rank owns some of the rows. It routes these
alone and tells the others; no row has to be sent to its experts, whose ranks have it. Ranks send results to the owners
of the rows that their experts have got, owners add them up in the order of ranks, which has the bits of a sum in that
order, and all ranks gather the rows.

    bytes that a rank sends, of rows of H numbers:  all-reduce   2 · T · H · (W - 1) / W
                                                    all-to-all   (1 + s) · T · H · (W - 1) / W, and the routes

T rows, W ranks; s is the share of pairs of a row and a rank in which the rank has an expert of the row. How many rows
go from where to where is different in each step. So steps that are repeated without calling layers keep to the sum; by
their number of rows alone, which is the same on all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from ratoon.layers.ops import Routes
from ratoon.layers.shard import Shard

Tensor = torch.Tensor

# More rows than a step may have that is a recorded pass on a CPU, or a CUDA graph
LEAST_ROWS_ON_CPU = 65
LEAST_ROWS_ON_GPU = 2049
MOST_SHARE = 0.7  # of pairs with an expert, for `auto`: with more of them little is saved


def expected_share(top_k: int, world_size: int) -> float:
    """The share of pairs of a row and a rank in which the rank has one of the row's `top_k` experts, where a router
    prefers none."""
    return 1.0 - (1.0 - 1.0 / world_size) ** top_k


def may_exchange(shard: Shard, top_k: int, has_shared: bool) -> bool:
    """Whether large steps of a layer go by all-to-all. `auto` leaves to the sum layers with shared experts, which every
    rank has whole for all-to-all, and ranks in one memory, which send nothing: a sum there is one kernel."""
    if not shard.expert_parallel or shard.expert_dispatch == "all_reduce":
        return False
    if shard.expert_dispatch == "all_to_all":
        return True
    shares_memory = shard.collective is not None and shard.collective.can_be_recorded
    return not has_shared and not shares_memory and expected_share(top_k, shard.world_size) <= MOST_SHARE


class SlicedRows(NamedTuple):
    """The rows of a step, cut into runs of equal length, one for each rank; the last one may have fewer."""

    num_rows: int
    each: int  # rows of a run
    own: slice  # of this rank

    @property
    def num_own(self) -> int:
        return self.own.stop - self.own.start


class ExpertExchange:
    """The exchange of one layer, of which each rank has `num_experts` divided by the number of ranks."""

    __slots__ = ("_collective", "_num_experts", "_rank", "_world_size", "least_rows")

    def __init__(self, shard: Shard, num_experts: int, device: torch.device) -> None:
        assert shard.collective is not None
        self._collective, self._rank, self._world_size = shard.collective, shard.rank, shard.world_size
        self._num_experts = num_experts
        least_rows = LEAST_ROWS_ON_CPU if device.type == "cpu" else LEAST_ROWS_ON_GPU
        self.least_rows = max(least_rows, (shard.world_size - 1) ** 2 + 1)  # then each rank owns some

    def slice_rows(self, num_rows: int) -> SlicedRows:
        each = -(-num_rows // self._world_size)
        start = min(self._rank * each, num_rows)
        return SlicedRows(num_rows, each, slice(start, min(start + each, num_rows)))

    def gather_routes(self, own: Routes, rows: SlicedRows) -> Routes:
        """Routes of all rows, from those of each rank's own. Experts travel as floats, which hold their numbers."""
        both = torch.cat([own.experts.float(), own.weights.float()], dim=1)  # [own, 2 · k]
        experts, weights = self.gather_rows(both, rows).chunk(2, dim=1)
        return Routes(experts.int().contiguous(), weights.contiguous())

    def gather_rows(self, own: Tensor, rows: SlicedRows) -> Tensor:
        """All ranks' own rows [own, n] one behind the other: [T, n]."""
        width = own.shape[1]
        if len(own) < rows.each:
            own = functional.pad(own, (0, 0, 0, rows.each - len(own)))
        found = self._collective.all_gather(own.view(1, -1), self._world_size * rows.each * width)
        return found.view(-1, width)[: rows.num_rows]

    def combine(self, y: Tensor, experts: Tensor, rows: SlicedRows) -> Tensor:
        """The sums over ranks of this rank's own rows, from y [T, H], what its experts have made of all rows.
        experts [T, k]: of all rows."""
        world_size, each = self._world_size, rows.each
        ranks = experts.long() // (self._num_experts // world_size)  # [T, k]
        has_expert = torch.zeros(world_size * each, world_size, dtype=torch.bool, device=y.device)
        has_expert[: rows.num_rows].scatter_(1, ranks, True)  # [T, ranks]
        counts = has_expert.view(world_size, each, world_size).sum(1).T.tolist()  # [sources, owners]
        # Rows are in the order of their owners; those that come, in the order of their sources and of rows.
        sent = y.index_select(0, has_expert[:, self._rank].nonzero().flatten())
        received = self._collective.all_to_all(sent, counts)
        places = has_expert.view(world_size, each, -1)[self._rank].T.nonzero()[:, 1]
        total = y.new_zeros(each, y.shape[1])
        sizes = [of_source[self._rank] for of_source in counts]
        for part, into in zip(received.split(sizes), places.split(sizes), strict=True):
            total.index_add_(0, into, part)
        return total[: rows.num_own]
