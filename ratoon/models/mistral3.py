"""Ministral 3: Llama whose queries grow with their position behind the original length; and the text side of Mistral 3
(Mistral Small 3.1 and 3.2, Ministral 3), whose files hold an encoder of pictures beside it."""

from __future__ import annotations

import torch

from ratoon.core.config import ModelConfig
from ratoon.layers.weights import Weights
from ratoon.models.decoder import SelfAttention
from ratoon.models.llama import LlamaForCausalLM

PICTURES = ("vision_tower", "multi_modal_projector")


class Ministral3ForCausalLM(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        self.query_scale = query_scale_table(config, weights, max_position)
        super().__init__(config, weights, max_position)

    def build_attention(self, weights: Weights, index: int) -> SelfAttention:
        attention = super().build_attention(weights, index)
        attention.query_scale = self.query_scale
        return attention


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """The text model alone: the encoder of pictures is left out."""

    def find_body(self, weights: Weights) -> Weights:
        is_below_model = weights.has("model.language_model.embed_tokens.weight")
        around = weights / "model" if is_below_model else weights
        for name in PICTURES:
            around.ignore_below(name, "read pictures")
        return weights / "model" / "language_model" if is_below_model else weights / "language_model" / "model"

    def find_head(self, weights: Weights) -> Weights:
        is_below_model = weights.has("model.language_model.embed_tokens.weight")
        return weights if is_below_model else weights / "language_model"

    def has_tied_head(self, weights: Weights) -> bool:
        """Files written by transformers may say that the head is tied, which is the default there, and hold another
        one, which transformers then takes."""
        head = f"{self.find_head(weights).prefix}lm_head.weight"
        return super().has_tied_head(weights) and head not in weights.source.shapes()


def query_scale_table(config: ModelConfig, weights: Weights, max_position: int) -> torch.Tensor | None:
    """[max_position, 1, 1]: what queries are multiplied with at each position, in the model's dtype as in transformers.
    None: 1 at all of them."""
    beta, original = config.rope_scaling.query_beta, config.rope_scaling.original_max_position
    if beta is None or original is None or max_position <= original:
        return None
    if weights.device.type == "meta":
        return torch.empty((max_position, 1, 1), dtype=weights.dtype, device="meta")
    positions = torch.arange(max_position, dtype=torch.float32)
    scale = 1 + beta * torch.log(1 + torch.floor(positions / original))
    return scale.to(weights.device, weights.dtype).view(-1, 1, 1)
