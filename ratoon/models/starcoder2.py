"""StarCoder2: Llama with layer norms, biases and a feed-forward half without a gate."""

from __future__ import annotations

from ratoon.layers.linear import ColumnParallelLinear, RowParallelLinear
from ratoon.layers.mlp import MLP, FeedForward
from ratoon.layers.norm import LayerNorm
from ratoon.layers.weights import Weights
from ratoon.models.llama import LlamaForCausalLM


class Starcoder2ForCausalLM(LlamaForCausalLM):
    def build_norm(self, weights: Weights) -> LayerNorm:
        return LayerNorm(weights, self.config.hidden_size, self.config.norm_eps)

    def build_mlp(self, weights: Weights) -> FeedForward:
        config = self.config
        up = ColumnParallelLinear(weights / "c_fc", config.hidden_size, config.intermediate_size, config.mlp_bias)
        down = RowParallelLinear(weights / "c_proj", config.intermediate_size, config.hidden_size, config.mlp_bias)
        return MLP(up, down, weights.ops, config.activation)
