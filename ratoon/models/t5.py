"""T5 and Flan-T5: RMS norms, and positions only as a bias on scores by distance, shared by all layers of a stack.

Scores are not scaled. The older form has a plain feed-forward half and a tied head after a scaling; the newer one a
gated half and a separate head.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ratoon.core.config import ModelConfig
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.attention import AttentionLayer
from ratoon.layers.embedding import LMHead
from ratoon.layers.linear import ColumnParallelLinear, MergedLinear, QKVLinear, RowParallelLinear
from ratoon.layers.mlp import MLP, FeedForward, GatedMLP
from ratoon.layers.norm import RMSNorm
from ratoon.layers.relative_positions import relative_bias
from ratoon.layers.weights import Weights
from ratoon.models.cross import CrossAttention, PreNormCrossLayer
from ratoon.models.decoder import PreNormLayer, SelfAttention
from ratoon.models.encoder_decoder import Encoder, EncoderDecoderLM
from ratoon.models.text_input import TextInput, shared_embedding

Tensor = torch.Tensor

TABLE = "block.0.layer.0.SelfAttention.relative_attention_bias"


class T5ForConditionalGeneration(EncoderDecoderLM):
    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        super().__init__(config, weights)
        names = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
        tied = config.tie_word_embeddings or not weights.has("lm_head.weight")
        ends = weights.on_stages(first=True, last=tied)
        self.embed = shared_embedding(ends, names, config.vocab_size, config.hidden_size)
        self.encoder = self.build_encoder(weights.on_stages(first=True) / "encoder")
        decoder = weights / "decoder"
        # Some files have a second table, which is unused.
        decoder.ignore("block.0.layer.1.EncDecAttention.relative_attention_bias.weight")
        bias = self.build_bias(decoder, config.num_heads, max_position, both_ways=False)
        self.attention_layers = [replace(layer, scale=1.0, bias=bias) for layer in self.attention_layers]
        self.cross_layers = [replace(layer, scale=1.0) for layer in self.cross_layers]
        blocks = decoder / "block"
        self.layers = [
            self.build_layer(blocks / index / "layer", place) for place, index in enumerate(self.layer_range)
        ]
        self.final_norm = self.build_norm(decoder.on_stages(last=True) / "final_layer_norm")
        self.logits_scale = config.hidden_size**-0.5 if config.tie_word_embeddings else 1.0
        self.lm_head = LMHead(weights.on_stages(last=True) / "lm_head", self.embed, tied)

    def compute_logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        return self.lm_head(hidden * self.logits_scale, adapters)

    def build_encoder(self, weights: Weights) -> Encoder:
        encoder = self.encoder_config
        bias = self.build_bias(weights, encoder.num_heads, encoder.max_position, both_ways=True)
        unscaled = [replace(layer, scale=1.0, bias=bias) for layer in self.encoder_attention_layers]
        self.encoder_attention_layers = unscaled
        layers = []
        for layer in unscaled:
            below = weights / "block" / layer.index / "layer"
            attention = self.build_attention(below / 0 / "SelfAttention", layer, encoder.num_heads)
            mlp = self.build_mlp(below / 1 / "DenseReluDense", encoder.intermediate_size)
            norms = [self.build_norm(below / part / "layer_norm") for part in range(2)]
            layers.append(PreNormLayer(norms[0], attention, norms[1], mlp))
        norm = self.build_norm(weights / "final_layer_norm")
        return Encoder(unscaled, TextInput(self.embed).of_batch, layers, norm)

    def build_layer(self, weights: Weights, index: int) -> PreNormCrossLayer:
        layer = self.attention_layers[index]
        attention = self.build_attention(weights / 0 / "SelfAttention", layer, self.config.num_heads)
        cross = self.build_cross_attention(weights / 1 / "EncDecAttention", index)
        mlp = self.build_mlp(weights / 2 / "DenseReluDense", self.config.intermediate_size)
        norms = [self.build_norm(weights / part / "layer_norm") for part in range(3)]
        return PreNormCrossLayer(norms[0], attention, norms[1], cross, norms[2], mlp)

    def build_attention(self, weights: Weights, layer: AttentionLayer, num_heads: int) -> SelfAttention:
        hidden = self.config.hidden_size
        qkv = QKVLinear(weights, ("q", "k", "v"), hidden, num_heads, num_heads, layer.head_dim)
        return SelfAttention(layer, qkv, RowParallelLinear(weights / "o", num_heads * layer.head_dim, hidden))

    def build_cross_attention(self, weights: Weights, index: int) -> CrossAttention:
        hidden, width = self.config.hidden_size, self.config.num_heads * self.config.head_dim
        query = ColumnParallelLinear(weights / "q", hidden, width)
        key_value = MergedLinear(weights, ("k", "v"), hidden, (width, width))
        output = RowParallelLinear(weights / "o", width, hidden)
        return CrossAttention(self.cross_layers[index], query, key_value, output)

    def build_mlp(self, weights: Weights, size: int) -> FeedForward:
        hidden, activation = self.config.hidden_size, self.config.activation
        if self.config.gated_mlp:
            return GatedMLP(weights, hidden, size, activation=activation, names=("wi_0", "wi_1", "wo"))
        up = ColumnParallelLinear(weights / "wi", hidden, size)
        return MLP(up, RowParallelLinear(weights / "wo", size, hidden), weights.ops, activation)

    def build_norm(self, weights: Weights) -> RMSNorm:
        return RMSNorm(weights, self.config.hidden_size, self.config.norm_eps)

    def build_bias(self, weights: Weights, num_heads: int, max_position: int, both_ways: bool) -> Tensor:
        assert self.config.relative_positions is not None
        return relative_bias(weights / TABLE, self.config.relative_positions, num_heads, max_position, both_ways)
