"""BART: learned positions, post-norm layers, tied head. mBART, Marian and Whisper have its tensor names and are
subclasses of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ratoon.core.config import ModelConfig
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.attention import AttentionLayer
from ratoon.layers.embedding import Embedding, LMHead, VocabParallelEmbedding
from ratoon.layers.linear import ColumnParallelLinear, MergedLinear, QKVLinear, RowParallelLinear
from ratoon.layers.mlp import MLP
from ratoon.layers.norm import LayerNorm
from ratoon.layers.weights import Weights
from ratoon.models.base import StreamLayer
from ratoon.models.cross import CrossAttention, PreNormCrossLayer
from ratoon.models.decoder import PreNormLayer, SelfAttention
from ratoon.models.encoder_decoder import CrossLayer, Encoder, EncoderBatch, EncoderDecoderLM
from ratoon.models.post_norm import PostNormCrossLayer, PostNormLayer
from ratoon.models.text_input import TextInput, shared_embedding

Tensor = torch.Tensor

UNUSED_POSITIONS = 2  # rows before the first position's, formerly for padding


class BartForConditionalGeneration(EncoderDecoderLM):
    pre_norm = False  # pre-norm layers, and a final norm
    key_bias = True  # whether k has a bias, as q and v do

    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        super().__init__(config, weights)
        model = weights / "model" if weights.has("model.decoder.layers.0.fc1.weight") else weights
        self.embed = self.build_embedding(model.on_stages(first=True, last=config.tie_word_embeddings))
        self.encoder = self.build_encoder(model.on_stages(first=True) / "encoder")
        decoder = model / "decoder"
        self.input = self.build_input(decoder.on_stages(first=True), config.max_position)
        layers = decoder / "layers"
        self.layers = [self.build_layer(layers / index, place) for place, index in enumerate(self.layer_range)]
        self.final_norm = self.build_norm(decoder.on_stages(last=True) / "layer_norm") if self.pre_norm else None
        self.lm_head = self.build_head(weights.on_stages(last=True))

    def build_embedding(self, weights: Weights) -> VocabParallelEmbedding:
        names = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
        return shared_embedding(weights, names, self.config.vocab_size, self.config.hidden_size)

    def build_input(self, weights: Weights, max_position: int) -> TextInput:
        positions = Embedding(weights / "embed_positions", max_position, self.config.hidden_size, UNUSED_POSITIONS)
        return TextInput(self.embed, positions, self.build_norm(weights / "layernorm_embedding"), self.embedding_scale)

    @property
    def embedding_scale(self) -> float:
        return self.config.hidden_size**0.5 if self.config.scale_embedding else 1.0

    def build_encoder(self, weights: Weights) -> Encoder:
        embed = self.build_encoder_input(weights)
        attention_layers = self.encoder_attention_layers
        layers = [self.build_encoder_layer(weights / "layers" / layer.index, layer) for layer in attention_layers]
        final_norm = self.build_norm(weights / "layer_norm") if self.pre_norm else None
        return Encoder(attention_layers, embed, layers, final_norm)

    def build_encoder_input(self, weights: Weights) -> Callable[[EncoderBatch, AdapterRows | None], Tensor]:
        return self.build_input(weights, self.encoder_config.max_position).of_batch

    def build_encoder_layer(self, weights: Weights, attention: AttentionLayer) -> StreamLayer:
        layer = PreNormLayer if self.pre_norm else PostNormLayer
        return layer(
            self.build_norm(weights / "self_attn_layer_norm"),
            self.build_attention(weights / "self_attn", attention),
            self.build_norm(weights / "final_layer_norm"),
            self.build_mlp(weights, self.encoder_config.intermediate_size),
        )

    def build_layer(self, weights: Weights, index: int) -> CrossLayer:
        layer = PreNormCrossLayer if self.pre_norm else PostNormCrossLayer
        return layer(
            self.build_norm(weights / "self_attn_layer_norm"),
            self.build_attention(weights / "self_attn", self.attention_layers[index]),
            self.build_norm(weights / "encoder_attn_layer_norm"),
            self.build_cross_attention(weights / "encoder_attn", index),
            self.build_norm(weights / "final_layer_norm"),
            self.build_mlp(weights, self.config.intermediate_size),
        )

    def build_attention(self, weights: Weights, layer: AttentionLayer) -> SelfAttention:
        names, biased = ("q_proj", "k_proj", "v_proj"), (True, self.key_bias, True)
        hidden, heads = self.config.hidden_size, self.config.hidden_size // layer.head_dim
        qkv = QKVLinear(weights, names, hidden, heads, heads, layer.head_dim, biased)
        return SelfAttention(layer, qkv, RowParallelLinear(weights / "out_proj", hidden, hidden, bias=True))

    def build_cross_attention(self, weights: Weights, index: int) -> CrossAttention:
        hidden = self.config.hidden_size
        query = ColumnParallelLinear(weights / "q_proj", hidden, hidden, bias=True)
        biased = (self.key_bias, True)
        key_value = MergedLinear(weights, ("k_proj", "v_proj"), hidden, (hidden, hidden), biased)
        output = RowParallelLinear(weights / "out_proj", hidden, hidden, bias=True)
        return CrossAttention(self.cross_layers[index], query, key_value, output)

    def build_mlp(self, weights: Weights, size: int) -> MLP:
        hidden = self.config.hidden_size
        up = ColumnParallelLinear(weights / "fc1", hidden, size, bias=True)
        down = RowParallelLinear(weights / "fc2", size, hidden, bias=True)
        return MLP(up, down, weights.ops, self.config.activation)

    def build_norm(self, weights: Weights) -> LayerNorm:
        return LayerNorm(weights, self.config.hidden_size, self.config.norm_eps)

    def build_head(self, weights: Weights) -> LMHead:
        bias = None
        if weights.has("final_logits_bias"):
            bias = weights.take("final_logits_bias", 1, self.config.vocab_size).view(-1)
        return LMHead(weights / "lm_head", self.embed, self.config.tie_word_embeddings, bias)
