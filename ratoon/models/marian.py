"""Marian: BART with sinusoidal positions and no norm after the embeddings."""

from __future__ import annotations

from ratoon.layers.embedding import SinusoidalPositions
from ratoon.layers.weights import Weights
from ratoon.models.bart import BartForConditionalGeneration
from ratoon.models.text_input import TextInput


class MarianMTModel(BartForConditionalGeneration):
    def build_input(self, weights: Weights, max_position: int) -> TextInput:
        positions = SinusoidalPositions(weights / "embed_positions", max_position, self.config.hidden_size)
        return TextInput(self.embed, positions, scale=self.embedding_scale)
