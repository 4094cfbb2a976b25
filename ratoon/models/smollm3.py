"""SmolLM3: Llama in which some layers do not rotate heads, by the config."""

from __future__ import annotations

from ratoon.layers.weights import Weights
from ratoon.models.decoder import SelfAttention
from ratoon.models.llama import LlamaForCausalLM


class SmolLM3ForCausalLM(LlamaForCausalLM):
    def build_attention(self, weights: Weights, index: int) -> SelfAttention:
        attention, rotary_layers = super().build_attention(weights, index), self.config.rotary_layers
        if rotary_layers is not None and not rotary_layers[self.layer_range[index]]:
            attention.rotary = None
        return attention
