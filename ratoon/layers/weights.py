"""How layers get their weights: they pull them by name, with the shape they need, while they are built.

A model is built twice. The first time on the meta device, where `take` only compares names and shapes: a file that does
not fit is refused before memory is spent. The second time for real. Loading is strict both ways: what a layer asks for
must be there, and what nobody asked for is an error. Where the tensors come from (files, random numbers) is not known
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from ratoon.core.errors import ModelError
from ratoon.layers.ops import Ops


class TensorSource(Protocol):
    """Named tensors of one checkpoint. Reading the shapes costs no memory."""

    name: str  # for messages: the file or folder

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in any floating dtype."""
        ...


class Weights:
    """A view of a checkpoint below a prefix, together with where and in what form its tensors are wanted."""

    def __init__(
        self,
        source: TensorSource,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        prefix: str = "",
        taken: dict[str, bool] | None = None,
    ) -> None:
        self.source = source
        self.ops = ops
        self.device = device
        self.dtype = dtype
        self.prefix = prefix
        self._taken = taken if taken is not None else {}  # name → was read (not just ignored), in order

    def __truediv__(self, name: object) -> Weights:
        """`weights / "layers" / 3` is the view below `layers.3`."""
        return Weights(self.source, self.ops, self.device, self.dtype, f"{self.prefix}{name}.", self._taken)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.source.shapes()

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor `name` below this prefix, which must have this shape, on the device in the wanted dtype."""
        full = self.prefix + name
        found = self.source.shapes().get(full)
        if found is None:
            raise ModelError(self.source.name, f"tensor {full!r} is missing", f"the model needs it with shape {shape}")
        if tuple(found) != shape:
            raise ModelError(
                self.source.name, f"tensor {full!r} has shape {tuple(found)}", f"the config asks for {shape}"
            )
        self._taken[full] = True
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return self.source.read(full).to(device=self.device, dtype=dtype or self.dtype)

    def ignore(self, *names: str) -> None:
        """Tensors that the file may hold and the model does not need (stored rotary tables, tied copies)."""
        for name in names:
            self._taken.setdefault(self.prefix + name, False)

    def taken_in_order(self) -> list[str]:
        """What was taken so far: the order in which another pass will want it."""
        return [name for name, was_read in self._taken.items() if was_read]

    def check_nothing_left(self) -> None:
        left = sorted(set(self.source.shapes()) - set(self._taken))
        if left:
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise ModelError(
                self.source.name,
                f"holds tensors that this model has no place for: {shown}",
                "a config and weights of one model",
            )
