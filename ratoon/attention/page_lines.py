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
    def __init__(self, make: Callable[..., Any], keeps_tensors: bool = False) -> None:
        """`make(base, shape, strides, box)`: a descriptor. `keeps_tensors`: Triton's interpreter reads them."""
        self._make = make
        self._keeps_tensors = keeps_tensors
        self._kept: dict[tuple[Any, ...], Any] = {}

    def describe(
        self, pages: torch.Tensor, num_lines: int, width: int, box: list[int], dtype: torch.dtype | None = None
    ) -> Any:
        """Lines of `width` numbers of `dtype` (None: that of the pages), of which `box` (lines, columns) are copied at
        once."""
        dtype = dtype or pages.dtype
        key = (pages.data_ptr(), dtype, num_lines, width, *box)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= MAX_DESCRIPTORS:
                self._kept.clear()
            base = pages.view(dtype) if self._keeps_tensors else Memory(pages.data_ptr(), dtype)
            found = self._kept[key] = self._make(base, [num_lines, width], [width, 1], box)
        return found
