"""Reads how many rows the experts of a mixture have got, for the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ratoon.layers.experts import ExpertMLP
from ratoon.models.base import LanguageModel

SECONDS_BETWEEN = 1.0  # there are thousands of numbers, which travel to the front end


class ExpertLoad:
    """Counts are read once a second. Those on a GPU are copied without waiting, and come with the reading behind."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock()
        self._copied: dict[int, torch.Tensor] = {}

    def take(self, model: LanguageModel) -> dict[int, list[int]]:
        """The rows of each expert since the model was loaded, by layer. Empty: it is too early for new ones."""
        now = self._clock()
        if now < self._next:
            return {}
        self._next = now + SECONDS_BETWEEN
        found = {}
        for index, layer in zip(model.layer_range, model.layers, strict=True):
            feed_forward = getattr(layer, "mlp", None)
            if not isinstance(feed_forward, ExpertMLP) or feed_forward.counts is None:
                continue
            counts = feed_forward.counts
            if counts.is_cuda:
                before = self._copied.get(index)
                target = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
                self._copied[index] = target.copy_(counts, non_blocking=True)
                if before is None:
                    continue
                counts = before
            found[index] = counts.tolist()
        return found
