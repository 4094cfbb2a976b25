"""GLM-4: Llama with biases of query, key and value, gate and up as one layer, and a rotation of a part of each head in
which neighbours are pairs. The later models (Glm4) have norms on both sides of each half of a layer."""

from __future__ import annotations

from ratoon.layers.linear import QKVLinear
from ratoon.layers.mlp import FUSED_GATED_NAMES, FeedForward, GatedMLP
from ratoon.layers.norm import RMSNorm
from ratoon.layers.rotary import rotary_dim_of
from ratoon.layers.weights import Weights
from ratoon.models.base import StreamLayer
from ratoon.models.decoder import SandwichLayer
from ratoon.models.llama import LlamaForCausalLM


class GlmForCausalLM(LlamaForCausalLM):
    def build_qkv(self, weights: Weights, bias: bool) -> QKVLinear:
        config, names = self.config, ("q_proj", "k_proj", "v_proj")
        interleaved_dim = rotary_dim_of(config) if config.interleaved_rotary else 0
        sizes = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        return QKVLinear(weights, names, *sizes, bias, interleaved_dim=interleaved_dim)

    def build_mlp(self, weights: Weights) -> FeedForward:
        config, names = self.config, FUSED_GATED_NAMES
        sizes = config.hidden_size, config.intermediate_size
        return GatedMLP(weights, *sizes, activation=config.activation, names=names)


class Glm4ForCausalLM(GlmForCausalLM):
    def build_layer(self, weights: Weights, index: int) -> StreamLayer:
        names = "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        before, attended, between, fed = (
            RMSNorm(weights / name, self.config.hidden_size, self.config.norm_eps) for name in names
        )
        attention = self.build_attention(weights / "self_attn", index)
        return SandwichLayer(before, attention, attended, between, self.build_mlp(weights / "mlp"), fed)
