"""The encoder of Qwen2.5-VL: that of Qwen2-VL with RMS norms, gated MLPs, and layers that attend inside windows.

Squares of patches run window after window, so that a window is a run of rows; the rows of embeddings go back to the
order of the picture.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ratoon.layers.mlp import FeedForward, GatedMLP
from ratoon.layers.norm import RMSNorm
from ratoon.layers.weights import Weights
from ratoon.models.vision.qwen2_vl import NORM_EPS, Grid, PatchLayout, Qwen2VLEncoder, positions_of_patches

# Of the inputs of a product: formats of few bits have blocks of so many, and cuBLAS multiplies 3,424 inputs 3.7 times
# as fast as the 3,420 of the published models (5,476 rows, 1,280 outputs, bf16, H200).
INNER_MULTIPLE = 32


class Qwen2_5_VLEncoder(Qwen2VLEncoder):
    def build_norm(self, weights: Weights) -> RMSNorm:
        return RMSNorm(weights, self.config.hidden_size, NORM_EPS)

    def build_mlp(self, weights: Weights) -> FeedForward:
        hidden, inner, activation = self.config.hidden_size, self.config.intermediate_size, self.config.activation
        padded = -(-inner // INNER_MULTIPLE) * INNER_MULTIPLE
        if padded not in (inner, hidden):
            weights = weights.padded(inner, padded)
            inner = padded
        return GatedMLP(weights, hidden, inner, True, activation)

    def has_windows(self, layer: int) -> bool:
        return layer not in self.config.full_attention_layers

    def lay_out(self, grid: Grid) -> PatchLayout:
        vision = self.config
        side = vision.window_size // vision.merge_size // vision.patch_size  # of a window, in squares
        return lay_out_windows(grid, vision.merge_size, side)


@lru_cache(maxsize=64)
def lay_out_windows(grid: Grid, merge_size: int, side: int) -> PatchLayout:
    """Windows have `side` squares on a side, and fewer at the right and lower edge. Windows lie row by row, and so do
    the squares in them."""
    time, height, width = grid
    shape = (time, height // merge_size, width // merge_size)
    frame, row, column = (index.ravel() for index in np.indices(shape))
    per_row = -(-shape[2] // side)  # windows side by side
    per_frame = -(-shape[1] // side) * per_row
    window = frame * per_frame + row // side * per_row + column // side
    order = np.argsort(window, kind="stable")
    square = merge_size**2
    positions = positions_of_patches(grid, merge_size).reshape(2, -1, square)[:, order].reshape(2, -1)
    frames = [height * width] * time
    return PatchLayout(positions, frames, (np.bincount(window) * square).tolist(), order)
