"""Which part of a model one of several workers has, and the interface for combining results.

Ranks have a part of every weight: column-parallel layers are cut by outputs, row-parallel ones by inputs, tables and
heads by vocabulary. Stages have some of the layers; the first has the embeddings too, the last the final norm and the
head. Processes and the transport between them belong to `distributed`; layers only cut and call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ratoon.core.errors import ModelError

Tensor = torch.Tensor


class Collective(Protocol):
    """Called by all ranks in the same order. Layers whose `communicates` is true call it."""

    # Whether a CUDA graph may hold a call: it runs on the current stream and does not wait for the host.
    can_be_captured: bool
    # Whether a recorded pass (layers/native/recording.py) may hold a call: the same memory, in every repetition.
    can_be_recorded: bool

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, on every rank. It may overwrite x."""
        ...

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """All ranks' columns side by side, in the order of ranks, on every rank: [T, size]. A rank's x is [T, n], with
        the columns that `Shard.cut_vocabulary` gives it."""
        ...

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """The rows that all ranks have for this one, in the order of ranks: [n, H]. A rank's x has its rows for all
        ranks, in their order too. counts[source][target]: rows from each rank to each, the same on all of them. Its
        sizes are those of the moment: neither a graph nor a recorded pass may hold a call."""
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a tensor-parallel group; by default the only one, which has all weights and does not communicate."""

    rank: int = 0
    world_size: int = 1
    collective: Collective | None = None
    expert_parallel: bool = False  # each rank has some of the experts of a layer whole, not a part of each
    expert_dispatch: str = "all_reduce"  # how these ranks' results come together: that, all_to_all, or auto

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


class StageLink(Protocol):
    """The way of a stage's rows to the next stage. Both sides know from the step plan how many there are."""

    def send(self, rows: Tensor) -> None:
        """Sends rows [R, H] to the next stage. Does not wait for it; the tensor must not be changed afterwards."""
        ...

    def receive(self, rows: Tensor) -> None:
        """Waits for the rows [R, H] of the stage before, and writes them to `rows`."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline; by default the only one, which has all layers."""

    index: int = 0
    count: int = 1
    link: StageLink | None = None  # None: this stage runs no step, or is the only one

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"stage {self.index} of {self.count}")

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def cut(self, num_layers: int) -> range:
        """This stage's layers. Where they can't be shared out equally the first stages have one more: the last one
        also has the head."""
        if num_layers < self.count:
            problem = f"{num_layers} layers can't be cut into {self.count} stages"
            raise ModelError("pipeline parallel", problem, f"at most {num_layers} stages")
        size, num_larger = divmod(num_layers, self.count)
        start = self.index * size + min(self.index, num_larger)
        return range(start, start + size + (self.index < num_larger))


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The part of a model that one worker has: a rank of a stage."""

    shard: Shard = Shard()
    stage: Stage = Stage()

    @property
    def is_whole(self) -> bool:
        return self.shard.world_size == self.stage.count == 1


WHOLE_MODEL = ModelPart()
