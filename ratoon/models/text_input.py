"""The embedding of tokens before the first layer of encoders, their decoders, and BERT."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ratoon.layers.adapters import AdapterRows
from ratoon.layers.embedding import RowEmbeddings, VocabParallelEmbedding, embed_rows
from ratoon.layers.norm import LayerNorm
from ratoon.layers.weights import Weights
from ratoon.models.encoder_decoder import EncoderBatch

Tensor = torch.Tensor


class TextInput:
    """Rows of the token table, scaled; then, where a family has them, those of the positions, and a norm."""

    __slots__ = ("norm", "positions", "scale", "tokens")

    def __init__(
        self,
        tokens: VocabParallelEmbedding,
        positions: Callable[[Tensor], Tensor] | None = None,
        norm: LayerNorm | None = None,
        scale: float = 1.0,
    ) -> None:
        self.tokens = tokens
        self.positions = positions
        self.norm = norm
        self.scale = scale

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        embeddings: RowEmbeddings | None = None,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """[T], [T] → [T, H], in new memory. `embeddings`, which are not scaled: of rows whose ids are not read."""
        stream = self.tokens(input_ids, adapters)
        if self.scale != 1.0:
            stream.mul_(self.scale)
        stream = embed_rows(stream, embeddings)
        if self.positions is not None:
            stream.add_(self.positions(positions))
        return stream if self.norm is None else self.norm(stream)

    def of_batch(self, batch: EncoderBatch, adapters: AdapterRows | None = None) -> Tensor:
        """The embedding of a text encoder's inputs."""
        assert batch.input_ids is not None, "this encoder reads tokens"
        return self(batch.input_ids, batch.positions, adapters=adapters)


class TypedInput(TextInput):
    """A TextInput for tokens of several types: the id of a token of type t is its own plus t times the size of the
    vocabulary. `types` [types, H] is what a type adds to the first one's embeddings."""

    __slots__ = ("types",)

    def __init__(
        self, tokens: VocabParallelEmbedding, positions: Callable[[Tensor], Tensor], norm: LayerNorm, types: Tensor
    ) -> None:
        super().__init__(tokens, positions, norm)
        self.types = types

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        embeddings: RowEmbeddings | None = None,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        vocab_size = self.tokens.vocab_size
        if input_ids.device.type == "cpu" and not bool((input_ids >= vocab_size).any()):
            return super().__call__(input_ids, positions, embeddings, adapters)
        stream = self.tokens(input_ids % vocab_size, adapters)
        assert self.positions is not None and self.norm is not None
        stream.add_(self.positions(positions)).add_(self.types[input_ids // vocab_size])
        return self.norm(stream)


def shared_embedding(weights: Weights, names: tuple[str, ...], count: int, size: int) -> VocabParallelEmbedding:
    """One token table that a file may have under any of these names, or as copies under several."""
    found = next((name for name in names if weights.has(f"{name}.weight")), names[0])
    for name in names:
        (weights / name).ignore("weight")
    return VocabParallelEmbedding(weights / found, count, size)
