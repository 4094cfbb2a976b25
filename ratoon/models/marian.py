"""Marian: BART with sinusoidal positions and no norm after the embeddings, and with a vocabulary for each side in some
models. Pegasus is the same with pre-norm layers."""

from __future__ import annotations

from ratoon.layers.embedding import SinusoidalPositions, VocabParallelEmbedding
from ratoon.layers.weights import Weights
from ratoon.models.bart import BartForConditionalGeneration
from ratoon.models.text_input import TextInput


class MarianMTModel(BartForConditionalGeneration):
    def build_embedding(self, weights: Weights) -> VocabParallelEmbedding:
        config, encoder = self.config, self.encoder_config
        if encoder.vocab_size is None:
            self.source_embed = super().build_embedding(weights)
            return self.source_embed
        own = weights / "encoder" / "embed_tokens"
        self.source_embed = VocabParallelEmbedding(own, encoder.vocab_size, config.hidden_size)
        return VocabParallelEmbedding(weights / "decoder" / "embed_tokens", config.vocab_size, config.hidden_size)

    def build_input(self, weights: Weights, max_position: int) -> TextInput:
        positions = SinusoidalPositions(weights / "embed_positions", max_position, self.config.hidden_size)
        is_encoder = weights.prefix.endswith("encoder.")
        table = self.source_embed if is_encoder else self.embed
        return TextInput(table, positions, scale=self.embedding_scale)


class PegasusForConditionalGeneration(MarianMTModel):
    pre_norm = True
