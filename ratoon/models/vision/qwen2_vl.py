"""The encoder of Qwen2-VL: patches of pictures and of pairs of frames, heads rotated by row and column, and a merger
that makes one row of embeddings of a square of patches.

Patches of a square are neighbours, as preprocessing orders them. A frame attends to itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby

import numpy as np
import torch

from ratoon.core.media import MediaConfig, MediaInput
from ratoon.layers.linear import ColumnParallelLinear, QKVLinear, RowParallelLinear
from ratoon.layers.mlp import MLP, FeedForward
from ratoon.layers.norm import LayerNorm, RMSNorm
from ratoon.layers.weights import Weights
from ratoon.models.media_encoder import Attend, read_pixels
from ratoon.models.vision.vit import PatchEmbedding, VisionLayer

Tensor = torch.Tensor
Grid = tuple[int, int, int]  # patches in time, height and width

NORM_EPS = 1e-6  # no config has a field for it
ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True, eq=False)
class PatchLayout:
    """How the patches of one input run through the layers."""

    positions: np.ndarray  # [2, T]: row and column of each patch, by which heads are rotated
    frames: list[int]  # the lengths of runs that are frames
    windows: list[int]  # the lengths of runs that are windows; frames, where there are none
    order: np.ndarray | None = None  # [T / merge_size²]: the squares in the order in which they run; None: as they came


class Qwen2VLEncoder:
    def __init__(self, weights: Weights, config: MediaConfig, out_size: int) -> None:
        """`out_size`: the hidden size of the decoder."""
        vision = config.vision
        self.config = vision
        self.device, self.ops = weights.device, weights.ops
        self.patches = PatchEmbedding(weights / "patch_embed" / "proj", config, bias=False, over_time=True)
        self.layers = [self.build_layer(weights / "blocks" / index) for index in range(vision.num_layers)]
        merger = weights / "merger"
        self.square = vision.merge_size**2  # patches
        wide = vision.hidden_size * self.square
        self.merger_norm = self.build_norm(merger / "ln_q")
        self.merger = MLP(
            ColumnParallelLinear(merger / "mlp" / 0, wide, wide, bias=True),
            RowParallelLinear(merger / "mlp" / 2, wide, out_size, bias=True),
            weights.ops,
            "gelu",
        )
        half = vision.hidden_size // vision.num_heads // 2  # pairs of a head: one half turns by rows, one by columns
        self.axes = torch.arange(2, dtype=torch.int32).repeat_interleave(half // 2).to(self.device)

    def build_layer(self, weights: Weights) -> VisionLayer:
        hidden, heads = self.config.hidden_size, self.config.num_heads
        attention = weights / "attn"
        return VisionLayer(
            self.build_norm(weights / "norm1"),
            QKVLinear(attention, ("qkv",), hidden, heads, heads, hidden // heads, bias=True),
            RowParallelLinear(attention / "proj", hidden, hidden, bias=True),
            self.build_norm(weights / "norm2"),
            self.build_mlp(weights / "mlp"),
        )

    def build_norm(self, weights: Weights) -> LayerNorm | RMSNorm:
        return LayerNorm(weights, self.config.hidden_size, NORM_EPS)

    def build_mlp(self, weights: Weights) -> FeedForward:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        up = ColumnParallelLinear(weights / "fc1", hidden, inner, bias=True)
        down = RowParallelLinear(weights / "fc2", inner, hidden, bias=True)
        return MLP(up, down, weights.ops, self.config.activation)

    def lay_out(self, grid: Grid) -> PatchLayout:
        frames = [grid[1] * grid[2]] * grid[0]
        return PatchLayout(positions_of_patches(grid, self.config.merge_size), frames, frames)

    def has_windows(self, layer: int) -> bool:
        """Whether a layer attends inside windows, not inside frames."""
        return False

    def encode(self, inputs: Sequence[MediaInput], attend: Attend) -> list[Tensor]:
        """The rows [num_rows, hidden size of the decoder] of each input, in order. All run as one batch."""
        layouts = [self.lay_out(media.grid) for media in inputs]
        stream = self._embed([self._order(media, layout) for media, layout in zip(inputs, layouts, strict=True)])
        frames = [length for layout in layouts for length in layout.frames]
        windows = [length for layout in layouts for length in layout.windows]
        positions = torch.from_numpy(np.concatenate([layout.positions for layout in layouts], axis=1))
        table = angles(int(positions.max()) + 1, self.config.hidden_size // self.config.num_heads, self.device)
        rotate = partial(self._rotate, positions=positions.to(self.device), table=table)
        update: Tensor | None = None
        for index, layer in enumerate(self.layers):
            update = layer(stream, update, attend, windows if self.has_windows(index) else frames, rotate)
        states = self.merger_norm(stream) if update is None else self.merger_norm(update, stream)
        merged = self.merger(states.view(-1, states.shape[1] * self.square))  # [squares, out size]
        found = merged.split([sum(layout.frames) // self.square for layout in layouts])
        return [self._restore(rows, layout) for rows, layout in zip(found, layouts, strict=True)]

    def _rotate(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> None:
        self.ops.rotary(q, k, positions, table, self.axes)

    def _order(self, media: MediaInput, layout: PatchLayout) -> Tensor:
        """The pixels of all patches, in the order in which they run: [T, …] uint8."""
        pixels = read_pixels(media, self.device)
        if layout.order is None:
            return pixels
        order = torch.from_numpy(layout.order).to(self.device)
        return pixels.view(-1, self.square, pixels.shape[1])[order].flatten(0, 1)

    def _restore(self, rows: Tensor, layout: PatchLayout) -> Tensor:
        """Rows of squares as they came, from the order in which they ran."""
        if layout.order is None:
            return rows
        return rows[torch.from_numpy(np.argsort(layout.order)).to(self.device)]

    def _embed(self, pixels: list[Tensor]) -> Tensor:
        """Patches of neighbours with equally many frames in one product."""
        found = [self.patches(torch.cat(list(alike))) for _, alike in groupby(pixels, key=lambda one: one.shape[1])]
        return found[0] if len(found) == 1 else torch.cat(found)


@lru_cache(maxsize=64)
def positions_of_patches(grid: Grid, merge_size: int) -> np.ndarray:
    """[2, T]: the row and the column of each patch. The patches of a square are neighbours, squares lie row by row."""
    time, height, width = grid
    shape = (height // merge_size, merge_size, width // merge_size, merge_size)
    places = np.indices((height, width)).reshape(2, *shape).swapaxes(2, 3).reshape(2, -1)
    return np.tile(places, time)


@lru_cache(maxsize=4)
def angles(num_positions: int, head_dim: int, device: torch.device) -> Tensor:
    """[positions, head_dim] in float32, as Ops.rotary reads it: the same frequencies for rows and for columns."""
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
    frequencies = 1.0 / ROPE_THETA**exponents  # [head_dim / 4]
    turned = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([turned.cos(), turned.cos(), turned.sin(), turned.sin()], dim=1).to(device)
