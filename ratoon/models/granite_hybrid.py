"""Granite 4: most layers have a state in the place of attention, a few attend; with experts beside a shared
feed-forward half, or without. The factors are Granite's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ratoon.core.config import ModelConfig
from ratoon.layers.attention import StateSpaceLayer
from ratoon.layers.experts import ExpertNames
from ratoon.layers.mlp import GATED_NAMES, FeedForward, GatedMLP
from ratoon.layers.state_space import StateSpaceMixer
from ratoon.layers.weights import Weights
from ratoon.models.base import MemoryLayer
from ratoon.models.decoder import SandwichLayer, SelfAttention
from ratoon.models.mixture import MixtureForCausalLM

SHARED_NAMES = ("input_linear", "output_linear")  # gate and up as one layer, and down


class GraniteMoeHybridForCausalLM(MixtureForCausalLM):
    part = "block_sparse_moe"

    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        self.state_layers: dict[int, StateSpaceLayer] = {}  # by their place among the layers of this stage
        super().__init__(config, weights, max_position)
        self.token_scale = config.embedding_multiplier

    def build_layer(self, weights: Weights, index: int) -> SandwichLayer:
        config, states = self.config, self.config.state_space
        assert states is not None
        mixer: SelfAttention | StateSpaceMixer
        if states.is_in_layer(self.layer_range[index]):
            mixer = StateSpaceMixer(weights / "mamba", index, states, config.hidden_size, config.norm_eps)
            self.state_layers[index] = mixer.layer
        else:
            mixer = self.build_attention(weights / "self_attn", index)
            if config.rotary_layers is not None:
                mixer.rotary = None
        scale = partial(weights.ops.scale, factor=config.residual_multiplier)
        first, second = weights / "input_layernorm", weights / "post_attention_layernorm"
        feed_forward = self.build_feed_forward(weights)
        return SandwichLayer(self.build_norm(first), mixer, scale, self.build_norm(second), feed_forward, scale)

    def build_feed_forward(self, weights: Weights) -> FeedForward:
        config = self.config
        has_experts = config.experts is not None
        is_fused = not weights.has("shared_mlp.gate_proj.weight")  # GGUF files have gate and up apart
        shared = GatedMLP(
            weights / "shared_mlp", config.hidden_size, config.intermediate_size, activation=config.activation,
            names=SHARED_NAMES if is_fused else GATED_NAMES, reduces=not has_experts,
        )  # fmt: skip
        if not has_experts:
            return shared
        is_file = not weights.has(f"{self.part}.router.weight")
        self.names = ExpertNames(router="router.layer" if is_file else "router")
        experts = self.build_experts(weights)
        experts.shared = shared
        return experts

    @property
    def memory_layers(self) -> Sequence[MemoryLayer]:
        return [self.state_layers.get(layer.index, layer) for layer in self.attention_layers]
