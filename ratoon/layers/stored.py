"""A tensor in its file's format: the data, their layout, and a function that decodes them to floats.

A source only returns these: the layer and its Ops decide whether a quantised weight stays quantised. Importing this
does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

FLOAT_FORMATS = {"torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


class TensorSlice(NamedTuple):
    """A part of a tensor: from `start` to `stop` along one of its dimensions."""

    dim: int
    start: int
    stop: int

    @classmethod
    def of_range(cls, dim: int, wanted: range, size: int) -> TensorSlice | None:
        """None where all of the dimension is wanted."""
        return None if len(wanted) == size else cls(dim, wanted.start, wanted.stop)

    def slices(self) -> tuple[slice, ...]:
        return (slice(None),) * self.dim + (slice(self.start, self.stop),)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return (*whole[: self.dim], self.stop - self.start, *whole[self.dim + 1 :])


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """Numbers in their file's format. Floats have `data` of the tensor's shape and no `decode`."""

    shape: tuple[int, ...]  # of the numbers
    format: str  # the file's name of it: F32, BF16, Q4_0, …
    data: torch.Tensor  # what the format says: GGUF's blocks are [rows, blocks of a row, bytes of a block]
    decode: Callable[[torch.Tensor], torch.Tensor] | None = None  # `data` to floats, in storage order
    transposed: bool = False  # encoded data hold the numbers of the transposed tensor
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)  # for formats with separate scales or zero points

    @classmethod
    def of_floats(cls, data: torch.Tensor, part: TensorSlice | None = None) -> StoredTensor:
        """Plain numbers, or this part of them."""
        data = data if part is None else data[part.slices()]
        return cls(tuple(data.shape), FLOAT_FORMATS.get(str(data.dtype), str(data.dtype)), data)

    def floats(self) -> torch.Tensor:
        """The numbers, in a floating dtype that represents them exactly."""
        if self.decode is None:
            return self.data
        numbers = self.decode(self.data)
        return numbers.view(self.shape[::-1]).t() if self.transposed else numbers.view(self.shape)

    def t(self) -> StoredTensor:
        if self.decode is None:
            return replace(self, shape=self.shape[::-1], data=self.data.t())
        return replace(self, shape=self.shape[::-1], transposed=not self.transposed)

    def with_rows(self, order: Sequence[int]) -> StoredTensor:
        """Returns the tensor with its rows in this order. Encoded rows are moved as they are where each is apart."""
        rows, parts = list(order), (self.data, *self.extras.values())
        if self.decode is None:
            return StoredTensor.of_floats(self.data[rows])
        if self.transposed or any(part.shape[:1] != self.shape[:1] for part in parts):
            return StoredTensor.of_floats(self.floats()[rows])
        return replace(self, data=self.data[rows], extras={name: part[rows] for name, part in self.extras.items()})

    def to(self, device: torch.device, dtype: torch.dtype) -> StoredTensor:
        """Moves the tensor to the device; floats get this dtype too."""
        if self.decode is None:
            return StoredTensor.of_floats(self.data.to(device=device, dtype=dtype))
        extras = {name: tensor.to(device) for name, tensor in self.extras.items()}
        return replace(self, data=self.data.to(device), extras=extras)
