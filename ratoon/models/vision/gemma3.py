"""The encoder of Gemma 3: a vision transformer (SigLIP) over pictures of one size, whose states are averaged by
squares, normed and projected to the hidden size of the decoder."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ratoon.core.media import MediaConfig, MediaInput
from ratoon.layers.norm import RMSNorm
from ratoon.layers.ops import WeightUse
from ratoon.layers.products import make_product
from ratoon.layers.weights import Weights
from ratoon.models.media_encoder import Attend, read_pixels
from ratoon.models.vision.vit import VisionTransformer

Tensor = torch.Tensor

# SigLIP's own end, which reads one vector out of its states: some files have it.
UNUSED_HEAD = (
    "probe", "attention.in_proj_weight", "attention.in_proj_bias", "attention.out_proj.weight",
    "attention.out_proj.bias", "layernorm.weight", "layernorm.bias", "mlp.fc1.weight", "mlp.fc1.bias",
    "mlp.fc2.weight", "mlp.fc2.bias",
)  # fmt: skip


class Gemma3Encoder:
    def __init__(self, weights: Weights, config: MediaConfig, out_size: int) -> None:
        """`weights`: below them are the tower and the projector. `out_size`: the hidden size of the decoder."""
        vision = config.vision
        self.device = weights.device
        self.rows_on_side = math.isqrt(config.num_rows)
        tower = weights / "vision_tower"
        if not tower.has("embeddings.patch_embedding.weight"):  # as older versions of transformers named it
            tower = tower / "vision_model"
        (tower / "head").ignore(*UNUSED_HEAD)
        self.transformer = VisionTransformer(tower, config, positions_in_order)
        projector = weights / "multi_modal_projector"
        self.norm = RMSNorm(projector / "mm_soft_emb_norm", vision.hidden_size, vision.norm_eps, is_offset=True)
        shape = (vision.hidden_size, out_size)
        weight = projector.take_stored("mm_input_projection_weight", *shape, transposed=True, use=WeightUse.LINEAR)
        self.project = make_product(weights.ops, [weight], None)

    def encode(self, inputs: Sequence[MediaInput], attend: Attend) -> list[Tensor]:
        """The rows [num_rows, hidden size of the decoder] of each picture, in order. All run as one batch."""
        found = self.transformer([read_pixels(media, self.device) for media in inputs], attend)
        averaged = torch.cat([average_squares(states, self.rows_on_side) for states in found])
        return list(self.project(self.norm(averaged)).split(self.rows_on_side**2))


def average_squares(states: Tensor, side: int) -> Tensor:
    """The states of a square picture's patches [patches, H] → [side², H], each the mean of a square of patches."""
    width = math.isqrt(len(states)) // side  # patches on a side of such a square
    return states.view(side, width, side, width, -1).mean(dim=(1, 3)).flatten(0, 1)


def positions_in_order(height: int, width: int, side: int) -> Tensor:
    """[height · width]: the place of each patch in the table of positions: its own, since pictures have one size."""
    assert height == width == side, "preprocessing makes pictures of one size"
    return torch.arange(side**2)
