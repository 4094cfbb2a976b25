"""Which part of every weight one of several ranks takes, and the interface for combining results.

Column-parallel layers are cut by outputs, row-parallel ones by inputs, tables and heads by vocabulary. Processes and
the transport between them belong to `distributed`; layers only cut and call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ratoon.core.errors import ModelError

Tensor = torch.Tensor


class Collective(Protocol):
    """Called by all ranks in the same order."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, on every rank. It may overwrite x."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x [T, n] side by side, in the order of ranks, on every rank: [T, world_size · n]."""
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a tensor-parallel group; by default the only one, which has all weights and does not communicate."""

    rank: int = 0
    world_size: int = 1
    collective: Collective | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or (self.collective is None) != (self.world_size == 1):
            raise ValueError(f"rank {self.rank} of {self.world_size} with collective {self.collective}")

    @property
    def all_reduce(self) -> Callable[[Tensor], Tensor] | None:
        """None where there is nothing to sum."""
        return None if self.collective is None else self.collective.all_reduce

    def cut(self, what: str, size: int) -> range:
        """This rank's range of `size` items; all ranks have equally many."""
        if size % self.world_size:
            problem = f"{size} {what} can't be cut into {self.world_size} equal parts"
            raise ModelError("tensor parallel", problem, f"a number of ranks that divides {size}")
        count = size // self.world_size
        return range(self.rank * count, (self.rank + 1) * count)

    def cut_heads(self, num_heads: int, num_kv_heads: int) -> tuple[range, range]:
        """This rank's query heads and the key-value heads that they read. With fewer of the latter than ranks, several
        ranks have the same one."""
        heads = self.cut("attention heads", num_heads)
        if num_kv_heads % self.world_size == 0:
            return heads, self.cut("key-value heads", num_kv_heads)
        if self.world_size % num_kv_heads:
            problem = f"{num_kv_heads} key-value heads can't be shared by {self.world_size} ranks"
            raise ModelError("tensor parallel", problem, f"a divisor or a multiple of {num_kv_heads}")
        own = self.rank * num_kv_heads // self.world_size
        return heads, range(own, own + 1)

    def cut_vocabulary(self, size: int) -> range:
        """This rank's rows of a table; the last rank may have fewer than the others."""
        count = -(-size // self.world_size)
        if (self.world_size - 1) * count >= size:
            raise ModelError("tensor parallel", f"{self.world_size} ranks have a vocabulary of {size}", "fewer ranks")
        return range(self.rank * count, min((self.rank + 1) * count, size))
