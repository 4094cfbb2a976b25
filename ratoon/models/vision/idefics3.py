"""The encoder of Idefics3 and SmolVLM: a vision transformer over tiles, whose states are gathered by squares and
projected to the hidden size of the decoder. How a picture is cut into tiles is preprocessing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ratoon.core.media import MediaConfig, MediaInput
from ratoon.layers.linear import ColumnParallelLinear
from ratoon.layers.weights import Weights
from ratoon.models.media_encoder import Attend, read_pixels
from ratoon.models.vision.vit import VisionTransformer

Tensor = torch.Tensor


class Idefics3Encoder:
    def __init__(self, weights: Weights, config: MediaConfig, out_size: int) -> None:
        """`out_size`: the hidden size of the decoder."""
        vision = config.vision
        self.config, self.device = vision, weights.device
        self.transformer = VisionTransformer(weights / "vision_model", config)
        projection = weights / "connector" / "modality_projection" / "proj"
        self.project = ColumnParallelLinear(projection, vision.hidden_size * vision.merge_size**2, out_size)

    def encode(self, inputs: Sequence[MediaInput], attend: Attend) -> list[Tensor]:
        """The rows [num_rows, hidden size of the decoder] of each tile, in order. All run as one batch."""
        tiles = [read_pixels(media, self.device) for media in inputs]
        found = self.transformer(tiles, attend)
        side = self.config.patch_size
        gathered = [
            gather_squares(states, tile.shape[1] // side, tile.shape[2] // side, self.config.merge_size)
            for states, tile in zip(found, tiles, strict=True)
        ]
        return list(self.project(torch.cat(gathered)).split([len(rows) for rows in gathered]))


def gather_squares(states: Tensor, height: int, width: int, side: int) -> Tensor:
    """[height · width, H] → [height · width / side², side² · H]: the states of a square of patches side by side, row by
    row ("pixel shuffle")."""
    squares = states.view(height // side, side, width // side, side, -1).transpose(1, 2)
    return squares.reshape(height * width // side**2, -1)
