"""Rope positions of prompts with pictures on three axes (M-RoPE of Qwen2-VL and Qwen2.5-VL): time, height and width.

Text counts on, with one position on all axes. The rows of a picture share the position at which it begins, plus their
place on each axis; what follows goes on behind its longer side. As in transformers' `get_rope_index`, the time of a
video does not move what follows. Decoding counts on from the last position, as `generate` of transformers does, so that
an answer has the positions that it will have as a part of the next prompt. (`rope_deltas` of transformers, by which
models are driven that get no positions, goes on behind the greatest position: that is another one where the time of a
video runs ahead of its rows.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ratoon.core.media import RopePositions

if TYPE_CHECKING:
    import numpy as np


MAX_POSITION = 2**30  # of a step in time, from the beginning of its video: no model has half as many places


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one picture in a prompt."""

    offset: int
    grid: tuple[int, int, int]  # patches in time, height and width
    time_interval: float = 1.0  # positions between two steps in time

    def has_large_times(self) -> bool:
        """Whether the time of its last step is no position that could be written in 32 bits."""
        return not (self.grid[0] - 1) * self.time_interval < MAX_POSITION


def rope_index(num_tokens: int, spans: Sequence[Span], merge_size: int) -> tuple[np.ndarray, int]:
    """Positions as int32 [3, num_tokens], and the delta: a token behind the prompt has its index plus this.
    No span may have large times."""
    import numpy as np

    positions = np.empty((3, num_tokens), np.int32)
    filled = position = 0
    for span in spans:
        num_text = span.offset - filled
        positions[:, filled : span.offset] = np.arange(position, position + num_text)
        position += num_text
        steps, high, wide = span.grid[0], span.grid[1] // merge_size, span.grid[2] // merge_size
        filled = span.offset + steps * high * wide
        # float32, as a tensor of seconds has it: the rounding decides on which position a step falls
        times = (np.arange(steps, dtype=np.float32) * np.float32(span.time_interval)).astype(np.int64)
        axes = np.meshgrid(times, np.arange(high), np.arange(wide), indexing="ij")
        positions[:, span.offset : filled] = np.stack(axes).reshape(3, -1) + position
        position += max(high, wide)
    positions[:, filled:] = np.arange(position, position + num_tokens - filled)
    return positions, int(positions[:, -1].max()) + 1 - num_tokens


def pack_positions(positions: np.ndarray, delta: int) -> RopePositions:
    return RopePositions(positions.tobytes(), delta)
