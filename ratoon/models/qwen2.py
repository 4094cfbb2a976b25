"""Qwen2: Llama with a bias on query, key and value. Its later layers may have a sliding window, by the config."""

from __future__ import annotations

from ratoon.layers.linear import QKVLinear
from ratoon.layers.weights import Weights
from ratoon.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    def build_qkv(self, weights: Weights, bias: bool) -> QKVLinear:
        # Its config files do not mention the bias: it belongs to the family.
        return super().build_qkv(weights, bias=True)
