"""The interface of a model for the runner: its config, its attention layers, a forward pass and logits.

A family subclasses LanguageModel and builds four parts: `embed`, `layers`, `final_norm` and `lm_head`. Of a pipeline it
builds the layers of its stage (`layer_range`), and both ends where they are (`Weights.on_stages`). Models with an
encoder are in encoder_decoder.py. Where keys and values are stored, and which rows are sampled, is the runner's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ratoon.core.config import ModelConfig
from ratoon.layers.adapters import AdapterRows, AdapterTarget, TableTarget
from ratoon.layers.attention import (
    AttentionLayer,
    CrossAttentionLayer,
    LatentAttentionLayer,
    StateSpaceLayer,
    StepContext,
)
from ratoon.layers.embedding import LMHead, RowEmbeddings, VocabParallelEmbedding, embed_rows
from ratoon.layers.norm import LayerNorm, RMSNorm
from ratoon.layers.shard import Shard, Stage
from ratoon.layers.weights import Weights
from ratoon.models.media_encoder import MediaEncoder

Tensor = torch.Tensor


MemoryLayer = AttentionLayer | StateSpaceLayer


class StreamLayer(Protocol):
    """A layer between the embeddings and the final norm: two halves, so that rows can be dropped between them."""

    def __call__(self, stream: Tensor, update: Tensor | None, positions: Tensor, step: StepContext) -> Tensor | None:
        """All [T, H]. Adds `update` to the stream in place; returns the next update, or None if that is added too."""
        return self.finish(self.attend(stream, update, positions, step), stream, step.adapters)

    def attend(self, stream: Tensor, update: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """The first half, in which rows depend on each other: → [T, heads · head_dim]."""
        ...

    def finish(self, attended: Tensor, stream: Tensor, adapters: AdapterRows | None) -> Tensor | None:
        """The second half, in which rows are independent: → the next update [T, H], or None."""
        ...


class StreamObserver(ABC):
    """Gets the residual stream between the layers of a forward pass."""

    num_layers_read: int  # the number of layers that must run for it

    @abstractmethod
    def observe(self, layer: int, stream: Tensor, update: Tensor | None) -> None:
        """Sees the state after `layer` layers, fewer than all: `stream` [T, H] and the update yet to be added to it.
        The next layer changes both."""


@dataclass(frozen=True, slots=True)
class StreamStates:
    """The residual stream between two layers: what a stage of a pipeline hands to the next one."""

    stream: Tensor  # [T, H]
    update: Tensor | None = None  # [T, H] that is yet to be added to it


@dataclass(frozen=True, slots=True)
class FinalStates:
    """Rows at the end of the residual stream, and the same rows after the final norm."""

    stream: Tensor  # [R, H]
    normed: Tensor  # [R, H]

    def select(self, rows: Tensor | slice) -> FinalStates:
        return FinalStates(self.stream[rows], self.normed[rows])


def end_of_stream(final_norm: RMSNorm | LayerNorm | None, update: Tensor | None, stream: Tensor) -> FinalStates:
    """The final states of the stream [R, H], to which the final norm adds the last update in place, if there is one.

    No norm follows post-norm layers (post_norm.py).
    """
    if final_norm is None:
        return FinalStates(stream, stream)
    return FinalStates(stream, final_norm(stream) if update is None else final_norm(update, stream))


class LanguageModel:
    """A stack of layers over tokens. All choices are made when it is built.

    Most are decoders. With `config.causal` False it is an encoder only, which has states and no logits; so has a
    decoder without a head (`config.has_lm_head`).
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    shard: Shard
    stage: Stage
    layer_range: range  # those of the config's layers that this stage has: all, unless it is one of several stages
    attention_layers: Sequence[AttentionLayer]
    cross_layers: Sequence[CrossAttentionLayer] = ()  # of a decoder with an encoder: one per layer
    encoder_attention_layers: Sequence[AttentionLayer] = ()  # of that encoder
    embed: VocabParallelEmbedding
    token_scale: float | None = None  # of tokens' embeddings; those that a request brings are not scaled
    input: Callable[..., Tensor] | None = None  # of tokens and positions, where that is more than an embedding
    media_encoder: MediaEncoder | None = None  # of a model that reads images, on the first stage
    layers: Sequence[StreamLayer]
    final_norm: RMSNorm | LayerNorm | None
    lm_head: LMHead
    classifier: Callable[[Tensor], Tensor] | None = None  # on the last stage: pooled states [R, H] → logits [R, labels]
    adapter_targets: Mapping[str, AdapterTarget]  # by the names of the checkpoint's linear layers
    adapter_tables: Mapping[str, TableTarget]  # the same of its table of tokens
    # Whether steps can be repeated without calling its layers, as CUDA graphs and recorded passes do
    can_be_repeated: bool = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.adapter_targets, self.adapter_tables = weights.adapter_targets, weights.adapter_tables
        self.shard = weights.shard
        self.stage = weights.stage
        self.device, self.dtype = weights.device, weights.dtype
        self.layer_range = weights.stage.cut(config.num_layers)
        heads, kv_heads = map(len, weights.shard.cut_heads(config.num_heads, config.num_kv_heads))  # this rank's
        head_dim = config.head_dim
        scale = head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.attention_layers = [
            AttentionLayer(
                place, heads, kv_heads, head_dim, scale, config.window_of_layer(index), config.causal,
                soft_cap=config.attention_soft_cap,
            )
            for place, index in enumerate(self.layer_range)
        ]  # fmt: skip
        if config.latent is not None:
            self.attention_layers = [
                LatentAttentionLayer(place, heads, 1, head_dim, scale, rope_dim=config.latent.rope_dim)
                for place in range(len(self.layer_range))
            ]
        self.scale_rows = weights.ops.scale

    @property
    def memory_layers(self) -> Sequence[MemoryLayer]:
        """What layers keep of a sequence, one for each: keys and values, or a state."""
        return self.attention_layers

    @property
    def communicating_parts(self) -> frozenset[str]:
        """The parts whose calls hold collectives of all ranks: of "embed", "layers" and "head". What repeats them
        without calling them, as CUDA graphs and recorded passes do, needs a Collective that allows it."""
        if self.shard.collective is None:
            return frozenset()
        has_head = hasattr(self, "lm_head") and self.lm_head.communicates
        return frozenset(["layers", *(["embed"] if self.embed.communicates else []), *(["head"] if has_head else [])])

    def embed_tokens(
        self,
        input_ids: Tensor,
        positions: Tensor,
        embeddings: RowEmbeddings | None = None,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """[T], [T] → [T, H], in new memory. `embeddings`: of rows whose token ids are not read."""
        if self.input is not None:
            return self.input(input_ids, positions, embeddings, adapters)
        found = self.embed(input_ids, adapters)
        if self.token_scale is not None:
            self.scale_rows(found, self.token_scale)
        return embed_rows(found, embeddings)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: StepContext,
        rows: Tensor | None = None,
        observers: Sequence[StreamObserver] = (),
        num_layers: int | None = None,
        rope_positions: Tensor | None = None,
        embeddings: RowEmbeddings | None = None,
    ) -> FinalStates:
        """[T], [T] → the final states of all rows [T, H], or of these `rows` [R] → [R, H]. `observers` get the stream
        before every layer. With `num_layers` below the model's, the pass ends after them, and no row has a final state.
        `rope_positions`, [T] or [axes, T]: by which heads are rotated; None: by `positions`. `embeddings`: the inputs
        of rows that are no token ids.

        `stream` is the residual stream and is added to in place; `update` is the output of the layer before, unless its
        last product has added that. The hidden state after a layer is their sum. The next norm does the addition, so
        that memory is read once.
        """
        stream = self.embed_tokens(input_ids, positions, embeddings, step.adapters)
        positions = positions if rope_positions is None else rope_positions
        return self.forward_stream(stream, positions, step, rows, observers, num_layers)

    def forward_stream(
        self,
        stream: Tensor,
        positions: Tensor,
        step: StepContext,
        rows: Tensor | None = None,
        observers: Sequence[StreamObserver] = (),
        num_layers: int | None = None,
        update: Tensor | None = None,
    ) -> FinalStates:
        """Runs the layers behind the embeddings [T, H], which are added to in place. Of the last of several stages:
        those behind the stream and the update that `forward_stage` of the stage before returned."""
        first = self.layer_range.start
        for index, layer in enumerate(self.layers):
            for observer in observers:
                observer.observe(first + index, stream, update)
            if num_layers is not None and first + index >= num_layers:
                return FinalStates(stream[:0], stream[:0])
            if index < len(self.layers) - 1:
                update = layer(stream, update, positions, step)
        return self._finish(stream, update, positions, step, rows)

    def forward_stage(
        self,
        states: StreamStates,
        positions: Tensor,
        step: StepContext,
        observers: Sequence[StreamObserver] = (),
        num_layers: int | None = None,
    ) -> StreamStates:
        """Runs the layers of a stage that is not the last, over all rows. The stream is added to in place; that of the
        first stage is `embed_tokens`. `num_layers` counts those of the whole model, as in `forward`."""
        stream, update = states.stream, states.update
        for index, layer in zip(self.layer_range, self.layers, strict=True):
            for observer in observers:
                observer.observe(index, stream, update)
            if num_layers is not None and index >= num_layers:
                break
            update = layer(stream, update, positions, step)
        return StreamStates(stream, update)

    def send_rows(self, rows: Tensor) -> None:
        """Sends rows [R, H] to the next stage."""
        assert self.stage.link is not None, "the stage is linked to no other"
        self.stage.link.send(rows)

    def receive_rows(self, num_rows: int) -> Tensor:
        """Waits for the rows [R, H] of the stage before."""
        assert self.stage.link is not None, "the stage is linked to no other"
        rows = torch.empty((num_rows, self.config.hidden_size), dtype=self.dtype, device=self.device)
        self.stage.link.receive(rows)
        return rows

    def _finish(
        self, stream: Tensor, update: Tensor | None, positions: Tensor, step: StepContext, rows: Tensor | None
    ) -> FinalStates:
        """The last layer and the final norm. The layer's second half is computed only for rows that are read, and where
        the step can do it, its attention too."""
        last, adapters = self.layers[-1], step.adapters
        reading = None if rows is None else step.reading(rows)
        attended = last.attend(stream, update, positions, reading or step)
        if rows is not None:
            attended, stream = attended if reading else attended[rows], stream[rows]
            adapters = None if adapters is None else adapters.select(rows)
        return end_of_stream(self.final_norm, last.finish(attended, stream, adapters), stream)

    def compute_logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """[R, H] → [R, V] in the same dtype: what reads logits in float32 converts them. `adapters` are those of the
        rows."""
        return self.lm_head(hidden, adapters)


# A family is built from a config, its weights, and the number of positions in its tables.
ModelClass = Callable[[ModelConfig, Weights, int], LanguageModel]
