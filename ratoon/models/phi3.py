"""Phi-3 and Phi-4: Llama whose checkpoint has query, key and value as one layer, and gate and up as another. Some
rotate a part of each head (Phi-4-mini), some have a window, by the config."""

from __future__ import annotations

from ratoon.layers.linear import QKVLinear
from ratoon.layers.mlp import FUSED_GATED_NAMES, FeedForward, GatedMLP
from ratoon.layers.weights import Weights
from ratoon.models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    def build_qkv(self, weights: Weights, bias: bool) -> QKVLinear:
        config = self.config
        sizes = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        return QKVLinear(weights, ("qkv_proj",), *sizes, bias)

    def build_mlp(self, weights: Weights) -> FeedForward:
        config, names = self.config, FUSED_GATED_NAMES
        sizes = config.hidden_size, config.intermediate_size
        return GatedMLP(weights, *sizes, activation=config.activation, names=names)
