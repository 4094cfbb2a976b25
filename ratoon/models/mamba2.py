"""Mamba-2: layers with a state in the place of attention, and no feed-forward half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ratoon.core.config import ModelConfig
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.attention import StateSpaceLayer, StepContext
from ratoon.layers.embedding import LMHead, VocabParallelEmbedding
from ratoon.layers.norm import RMSNorm
from ratoon.layers.state_space import StateSpaceMixer
from ratoon.layers.weights import Weights
from ratoon.models.base import LanguageModel, MemoryLayer, StreamLayer

Tensor = torch.Tensor


@dataclass(slots=True, eq=False)
class MixerLayer(StreamLayer):
    """A norm and the mixer, which is added to the residual stream."""

    norm: RMSNorm
    mixer: StateSpaceMixer

    def attend(self, stream: Tensor, update: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """The first half, in which rows depend on each other: → [T, inner]."""
        return self.mixer(self.norm.before_product(stream, update), positions, step)

    def finish(self, attended: Tensor, stream: Tensor, adapters: AdapterRows | None) -> Tensor | None:
        """The second half, in which rows are independent: → [T, H], or None."""
        return self.mixer.output.add_to(stream, attended, adapters)


class Mamba2ForCausalLM(LanguageModel):
    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        super().__init__(config, weights)
        body, size = weights / "backbone", config.hidden_size
        name = "embedding" if body.has("embedding.weight") else "embeddings"  # of older files
        table = body.on_stages(first=True, last=config.tie_word_embeddings) / name
        self.embed = VocabParallelEmbedding(table, config.vocab_size, size)
        layers = body / "layers"
        self.layers = self.mixers = [
            self.build_layer(layers / index, place) for place, index in enumerate(self.layer_range)
        ]
        self.final_norm = RMSNorm(body.on_stages(last=True) / "norm_f", size, config.norm_eps)
        self.lm_head = LMHead(weights.on_stages(last=True) / "lm_head", self.embed, config.tie_word_embeddings)

    def build_layer(self, weights: Weights, index: int) -> MixerLayer:
        config = self.config
        assert config.state_space is not None
        return MixerLayer(
            RMSNorm(weights / "norm", config.hidden_size, config.norm_eps),
            StateSpaceMixer(weights / "mixer", index, config.state_space, config.hidden_size, config.norm_eps),
        )

    @property
    def memory_layers(self) -> Sequence[MemoryLayer]:
        layers: list[StateSpaceLayer] = [layer.mixer.layer for layer in self.mixers]
        return layers
