"""Whisper: an encoder of log-mel features after two convolutions, and a decoder of text.

Layers have BART's tensor names, with pre-norm and no bias on keys. Audio features and the decoder's prompt are made
elsewhere.
"""

from __future__ import annotations

import torch

from ratoon.layers.adapters import AdapterRows
from ratoon.layers.conv import TimeConvolution
from ratoon.layers.embedding import Embedding, LMHead, VocabParallelEmbedding
from ratoon.layers.weights import Weights
from ratoon.models.bart import BartForConditionalGeneration
from ratoon.models.encoder_decoder import EncoderBatch
from ratoon.models.text_input import TextInput

Tensor = torch.Tensor


class AudioInput:
    """Features [N, mel bins, frames] → [N · frames / 2, H], with the positions added."""

    def __init__(self, weights: Weights, num_mel_bins: int, hidden_size: int, max_position: int) -> None:
        self.ops = weights.ops
        self.dtype = weights.dtype
        self.conv1 = TimeConvolution(weights / "conv1", num_mel_bins, hidden_size, stride=1)
        self.conv2 = TimeConvolution(weights / "conv2", hidden_size, hidden_size, stride=2)
        self.positions = Embedding(weights / "embed_positions", max_position, hidden_size)

    def __call__(self, batch: EncoderBatch, adapters: AdapterRows | None = None) -> Tensor:
        assert batch.features is not None, "this encoder reads audio"
        frames = batch.features.to(self.dtype).transpose(1, 2)  # [N, frames, mel bins]
        x = self.activate(self.conv1(frames))  # [N, frames, H]
        x = self.activate(self.conv2(x))  # [N, frames / 2, H]
        return x.add_(self.positions.table).flatten(0, 1)

    def activate(self, x: Tensor) -> Tensor:
        return self.ops.activation(x.flatten(0, 1), "gelu").view(x.shape)


class WhisperForConditionalGeneration(BartForConditionalGeneration):
    pre_norm = True
    key_bias = False

    def build_embedding(self, weights: Weights) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(weights / "decoder.embed_tokens", self.config.vocab_size, self.config.hidden_size)

    def build_input(self, weights: Weights, max_position: int) -> TextInput:
        return TextInput(self.embed, Embedding(weights / "embed_positions", max_position, self.config.hidden_size))

    def build_encoder_input(self, weights: Weights) -> AudioInput:
        encoder = self.encoder_config
        assert encoder.num_mel_bins is not None
        return AudioInput(weights, encoder.num_mel_bins, self.config.hidden_size, encoder.max_position)

    def build_head(self, weights: Weights) -> LMHead:
        return LMHead(weights / "proj_out", self.embed, self.config.tie_word_embeddings)
