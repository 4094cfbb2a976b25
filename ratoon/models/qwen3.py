"""Qwen3: Llama with an RMS norm over each query and key head before the rotation, and an explicit head size."""

from __future__ import annotations

from ratoon.layers.norm import HeadRMSNorm
from ratoon.layers.weights import Weights
from ratoon.models.decoder import SelfAttention
from ratoon.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    def build_attention(self, weights: Weights, index: int) -> SelfAttention:
        attention = super().build_attention(weights, index)
        attention.q_norm = HeadRMSNorm(weights / "q_norm", self.config.head_dim, self.config.norm_eps)
        attention.k_norm = HeadRMSNorm(weights / "k_norm", self.config.head_dim, self.config.norm_eps)
        return attention
