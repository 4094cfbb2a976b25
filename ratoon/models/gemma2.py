"""Gemma 2: norms on both sides of each half of a layer, layers with a window between those that see everything, scaled
embeddings, and soft caps of scores and logits. Gemma 3 (gemma3.py) is built on it."""

from __future__ import annotations

from dataclasses import replace

import torch

from ratoon.core.config import ModelConfig, RopeScaling
from ratoon.layers.embedding import LMHead, VocabParallelEmbedding
from ratoon.layers.linear import QKVLinear, RowParallelLinear
from ratoon.layers.mlp import GatedMLP
from ratoon.layers.norm import RMSNorm
from ratoon.layers.rotary import Rotary
from ratoon.layers.weights import Weights
from ratoon.models.base import LanguageModel
from ratoon.models.decoder import SandwichLayer, SelfAttention

Tensor = torch.Tensor


class Gemma2ForCausalLM(LanguageModel):
    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        super().__init__(config, weights)
        model, head = self.text_weights(weights)
        self.embed = VocabParallelEmbedding(
            model.on_stages(first=True, last=config.tie_word_embeddings) / "embed_tokens",
            config.vocab_size,
            config.hidden_size,
        )
        # Rounded to the dtype of the table, as transformers does: with 16 bits, the model was trained so.
        self.token_scale = torch.tensor(config.hidden_size**0.5, dtype=weights.dtype, device="cpu").item()
        self.rotary = Rotary(weights, config, max_position)
        self.local_rotary = self.rotary
        if config.local_rope_theta is not None:
            local = replace(config, rope_theta=config.local_rope_theta, rope_scaling=RopeScaling())
            self.local_rotary = Rotary(weights, local, max_position)
        layers = model / "layers"
        self.layers = [self.build_layer(layers / index, place) for place, index in enumerate(self.layer_range)]
        self.final_norm = self.build_norm(model.on_stages(last=True) / "norm")
        self.lm_head = LMHead(
            head.on_stages(last=True), self.embed, config.tie_word_embeddings, soft_cap=config.final_soft_cap
        )

    def text_weights(self, weights: Weights) -> tuple[Weights, Weights]:
        """Where the decoder is, and its head."""
        return weights / "model", weights / "lm_head"

    def build_layer(self, weights: Weights, index: int) -> SandwichLayer:
        config = self.config
        mlp = GatedMLP(weights / "mlp", config.hidden_size, config.intermediate_size, activation=config.activation)
        return SandwichLayer(
            self.build_norm(weights / "input_layernorm"),
            self.build_attention(weights / "self_attn", index),
            self.build_norm(weights / "post_attention_layernorm"),
            self.build_norm(weights / "pre_feedforward_layernorm"),
            mlp,
            self.build_norm(weights / "post_feedforward_layernorm"),
        )

    def build_norm(self, weights: Weights) -> RMSNorm:
        return RMSNorm(weights, self.config.hidden_size, self.config.norm_eps, is_offset=True)

    def build_attention(self, weights: Weights, index: int) -> SelfAttention:
        config, layer = self.config, self.attention_layers[index]
        width, names = config.num_heads * config.head_dim, ("q_proj", "k_proj", "v_proj")
        qkv = QKVLinear(
            weights, names, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
            config.attention_bias,
        )  # fmt: skip
        output = RowParallelLinear(weights / "o_proj", width, config.hidden_size, config.attention_output_bias)
        return SelfAttention(layer, qkv, output, self.rotary if layer.window is None else self.local_rotary)
