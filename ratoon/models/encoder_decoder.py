"""The interface of an encoder-decoder model for the runner: the decoder is a LanguageModel with cross-attention in its
layers, and keys and values of that attention are computed from the encoder's states once.

Where those are stored, and which encoder inputs run together, is the runner's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ratoon.core.config import EncoderConfig, ModelConfig
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer, StepContext
from ratoon.layers.norm import LayerNorm, RMSNorm
from ratoon.layers.weights import Weights
from ratoon.models.base import FinalStates, LanguageModel, StreamLayer, StreamObserver, end_of_stream
from ratoon.models.cross import CrossAttention

Tensor = torch.Tensor


@dataclass(slots=True)
class EncoderBatch:
    """Inputs of several requests, concatenated without padding: tokens, or features of audio."""

    positions: Tensor  # [E] of each state within its own input
    input_ids: Tensor | None = None  # [E]
    features: Tensor | None = None  # [N, mel bins, frames]; E = N · max_position
    waveforms: Sequence[Tensor] | None = None  # N times [1, samples]


class Encoder:
    """Embedding, layers with bidirectional attention within each input, and a final norm."""

    def __init__(
        self,
        attention_layers: Sequence[AttentionLayer],
        embed: Callable[[EncoderBatch, AdapterRows | None], Tensor],
        layers: Sequence[StreamLayer],
        final_norm: RMSNorm | LayerNorm | None,
    ) -> None:
        self.attention_layers = attention_layers
        self.embed = embed
        self.layers = layers
        self.final_norm = final_norm

    def __call__(self, batch: EncoderBatch, step: StepContext, observers: Sequence[StreamObserver] = ()) -> FinalStates:
        """The final states [E, H] of all inputs. `observers` get the stream as in LanguageModel.forward."""
        stream = self.embed(batch, step.adapters)
        update: Tensor | None = None
        for index, layer in enumerate(self.layers):
            for observer in observers:
                observer.observe(index, stream, update)
            update = layer(stream, update, batch.positions, step)
        return end_of_stream(self.final_norm, update, stream)


class CrossLayer(StreamLayer, Protocol):
    """A layer of the decoder."""

    @property
    def cross(self) -> CrossAttention: ...


class EncoderDecoderLM(LanguageModel):
    """A family builds `encoder` besides what a LanguageModel has. `forward` and the rest are the decoder's. Of a
    pipeline, the first stage has the encoder, and every stage stores keys and values of its states for its layers."""

    encoder: Encoder
    layers: Sequence[CrossLayer]

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        heads, head_dim = len(weights.shard.cut("attention heads", config.num_heads)), config.head_dim
        self.cross_layers = [
            CrossAttentionLayer(place, heads, head_dim, head_dim**-0.5) for place in range(len(self.layer_range))
        ]
        encoder = self.encoder_config
        heads, head_dim = len(weights.shard.cut("attention heads", encoder.num_heads)), encoder.head_dim
        self.encoder_attention_layers = [
            AttentionLayer(index, heads, heads, head_dim, head_dim**-0.5, causal=False)
            for index in range(encoder.num_layers)
        ]

    @property
    def encoder_config(self) -> EncoderConfig:
        assert self.config.encoder is not None
        return self.config.encoder

    def encode(self, batch: EncoderBatch, step: StepContext, observers: Sequence[StreamObserver] = ()) -> FinalStates:
        """The encoder's final states [E, H] of whole inputs."""
        return self.encoder(batch, step, observers)

    def store_cross(self, states: Tensor, step: StepContext) -> None:
        """Every decoder layer's keys and values of the encoder's states [E, H], handed to `step.store_across`."""
        for layer in self.layers:
            layer.cross.store(states, step)
