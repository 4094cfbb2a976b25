"""Falcon: GPT-NeoX with whole heads rotated, few KV heads and other names. Halves of a layer that run side by side read
one norm, or, in the larger models, one each."""

from __future__ import annotations

from ratoon.layers.norm import LayerNorm
from ratoon.layers.weights import Weights
from ratoon.models.gpt_neox import GPTNeoXForCausalLM


class FalconForCausalLM(GPTNeoXForCausalLM):
    body, table, stack, last_norm, attention = "transformer", "word_embeddings", "h", "ln_f", "self_attention"

    def build_norms(self, weights: Weights) -> tuple[LayerNorm, LayerNorm]:
        if not self.config.parallel_residual:
            return super().build_norms(weights)
        if weights.has("ln_attn.weight"):
            return self.build_norm(weights / "ln_attn"), self.build_norm(weights / "ln_mlp")
        norm = self.build_norm(weights / "input_layernorm")
        return norm, norm
