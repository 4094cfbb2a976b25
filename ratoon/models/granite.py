"""Granite: Llama with factors for embeddings, scores, what layers add to the residual stream, and logits."""

from __future__ import annotations

from functools import partial

from ratoon.core.config import ModelConfig
from ratoon.layers.norm import RMSNorm
from ratoon.layers.weights import Weights
from ratoon.models.decoder import SandwichLayer
from ratoon.models.llama import LlamaForCausalLM


class GraniteForCausalLM(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        super().__init__(config, weights, max_position)
        self.token_scale = config.embedding_multiplier

    def build_layer(self, weights: Weights, index: int) -> SandwichLayer:
        config = self.config
        scale = partial(weights.ops.scale, factor=config.residual_multiplier)
        return SandwichLayer(
            RMSNorm(weights / "input_layernorm", config.hidden_size, config.norm_eps),
            self.build_attention(weights / "self_attn", index),
            scale,
            RMSNorm(weights / "post_attention_layernorm", config.hidden_size, config.norm_eps),
            self.build_mlp(weights / "mlp"),
            scale,
        )
