"""gpt-oss: a mixture of experts whose attention heads have sinks, every other layer with a window. Gate and up of an
expert are limited, and all its products have a bias."""

from __future__ import annotations

from dataclasses import replace

import torch

from ratoon.layers.experts import ExpertNames
from ratoon.layers.stored import TensorSlice
from ratoon.layers.weights import Weights
from ratoon.models.decoder import SelfAttention
from ratoon.models.mixture import MixtureForCausalLM


class GptOssForCausalLM(MixtureForCausalLM):
    names = ExpertNames(router="router", router_bias=True)

    def build_attention(self, weights: Weights, index: int) -> SelfAttention:
        config = self.config
        own, _ = weights.shard.cut_heads(config.num_heads, config.num_kv_heads)
        part = TensorSlice.of_range(0, own, config.num_heads)
        sinks = weights.take("sinks", config.num_heads, part=part, dtype=torch.float32)
        layers = list(self.attention_layers)
        layers[index] = replace(layers[index], sinks=sinks.contiguous())
        self.attention_layers = layers
        return super().build_attention(weights, index)
