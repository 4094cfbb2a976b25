"""The pages of a cache as lines, each one head of one key or value, for kernels that copy boxes of them asynchronously:
descriptors for the hardware, which are kept, because to make one takes longer than a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

MAX_DESCRIPTORS = 1024


class Memory(NamedTuple):
    """What a descriptor needs of a tensor. The tensor itself would stay allocated for it."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class PageLines:
    def __init__(self, make: Callable[..., Any]) -> None:
        """`make(base, shape, strides, box)`: a descriptor."""
        self._make = make
        self._kept: dict[tuple[Any, ...], Any] = {}

    def describe(self, pages: torch.Tensor, num_lines: int, width: int, box: list[int]) -> Any:
        """Lines of `width` numbers, of which `box` (lines, columns) are copied at once."""
        key = (pages.data_ptr(), pages.dtype, num_lines, width, *box)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= MAX_DESCRIPTORS:
                self._kept.clear()
            found = self._kept[key] = self._make(
                Memory(pages.data_ptr(), pages.dtype), [num_lines, width], [width, 1], box
            )
        return found
