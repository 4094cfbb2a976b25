"""Moonshine: an encoder of sound as it is, after three convolutions, and a decoder of text. Heads are rotated on both
sides, in a part of them in which neighbours are pairs; norms have no bias; the decoder's feed-forward is gated."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from ratoon.core.config import ModelConfig
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.attention import AttentionLayer
from ratoon.layers.embedding import LMHead, VocabParallelEmbedding
from ratoon.layers.linear import ColumnParallelLinear, MergedLinear, QKVLinear, RowParallelLinear
from ratoon.layers.mlp import MLP, GatedMLP
from ratoon.layers.norm import LayerNorm
from ratoon.layers.rotary import Rotary, rotary_dim_of
from ratoon.layers.weights import Weights
from ratoon.models.base import StreamLayer
from ratoon.models.cross import CrossAttention, PreNormCrossLayer
from ratoon.models.decoder import PreNormLayer, SelfAttention
from ratoon.models.encoder_decoder import CrossLayer, Encoder, EncoderBatch, EncoderDecoderLM
from ratoon.models.waveform import CONVOLUTIONS

Tensor = torch.Tensor


class WaveformInput:
    """Samples of several inputs, [1, samples] each, → [E, H]: the states of all of them, one input behind the other."""

    def __init__(self, weights: Weights, hidden_size: int) -> None:
        sizes = ((1, hidden_size), (hidden_size, 2 * hidden_size), (2 * hidden_size, hidden_size))
        self.dtype = weights.dtype
        self.convolutions = []
        for number, ((inputs, outputs), (window, stride)) in enumerate(zip(sizes, CONVOLUTIONS, strict=True), start=1):
            part = weights / f"conv{number}"
            bias = None if number == 1 else part.take("bias", outputs)
            self.convolutions.append((part.take("weight", outputs, inputs, window), bias, stride))
        norm = weights / "groupnorm"
        self.norm = norm.take("weight", hidden_size), norm.take("bias", hidden_size)

    def __call__(self, batch: EncoderBatch, adapters: AdapterRows | None = None) -> Tensor:
        assert batch.waveforms is not None, "this encoder reads samples"
        return torch.cat([self.of_input(samples.to(self.dtype)) for samples in batch.waveforms])

    def of_input(self, samples: Tensor) -> Tensor:
        """[1, samples] → [states, H]. Each input by itself: the norm is over all of it."""
        first, *rest = self.convolutions
        x = torch.tanh(functional.conv1d(samples[None], *first))  # [1, H, samples / 64]
        x = functional.group_norm(x, 1, *self.norm)
        for weight, bias, stride in rest:
            x = functional.gelu(functional.conv1d(x, weight, bias, stride))
        return x[0].transpose(0, 1).contiguous()


class MoonshineForConditionalGeneration(EncoderDecoderLM):
    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        super().__init__(config, weights)
        model, decoder = weights / "model", weights / "model" / "decoder"
        table = (decoder / "embed_tokens").on_stages(first=True, last=config.tie_word_embeddings)
        self.embed = VocabParallelEmbedding(table, config.vocab_size, config.hidden_size)
        self.rotary = Rotary(weights, config, max_position)
        self.encoder = self.build_encoder(model.on_stages(first=True) / "encoder")
        layers = decoder / "layers"
        self.layers = [self.build_layer(layers / index, place) for place, index in enumerate(self.layer_range)]
        self.final_norm = self.build_norm(decoder.on_stages(last=True) / "norm")
        self.lm_head = LMHead(weights.on_stages(last=True) / "proj_out", self.embed, config.tie_word_embeddings)

    def build_encoder(self, weights: Weights) -> Encoder:
        encoder = self.encoder_config
        rotary = Rotary(weights, replace(self.config, head_dim=encoder.head_dim), encoder.max_position)
        embed = WaveformInput(weights, self.config.hidden_size)
        attention_layers = self.encoder_attention_layers
        layers = [self.build_encoder_layer(weights / "layers" / one.index, one, rotary) for one in attention_layers]
        return Encoder(attention_layers, embed, layers, self.build_norm(weights / "layer_norm"))

    def build_encoder_layer(self, weights: Weights, layer: AttentionLayer, rotary: Rotary) -> StreamLayer:
        encoder, hidden, mlp = self.encoder_config, self.config.hidden_size, weights / "mlp"
        up = ColumnParallelLinear(mlp / "fc1", hidden, encoder.intermediate_size, bias=True)
        down = RowParallelLinear(mlp / "fc2", encoder.intermediate_size, hidden, bias=True)
        return PreNormLayer(
            self.build_norm(weights / "input_layernorm"),
            self.build_attention(weights / "self_attn", layer, rotary),
            self.build_norm(weights / "post_attention_layernorm"),
            MLP(up, down, weights.ops, encoder.activation or self.config.activation),
        )

    def build_layer(self, weights: Weights, index: int) -> CrossLayer:
        config = self.config
        sizes = config.hidden_size, config.intermediate_size
        return PreNormCrossLayer(
            self.build_norm(weights / "input_layernorm"),
            self.build_attention(weights / "self_attn", self.attention_layers[index], self.rotary),
            self.build_norm(weights / "post_attention_layernorm"),
            self.build_cross_attention(weights / "encoder_attn", index),
            self.build_norm(weights / "final_layernorm"),
            GatedMLP(weights / "mlp", *sizes, True, config.activation, names=("fc1", "fc2"), gate_last=True),
        )

    def build_attention(self, weights: Weights, layer: AttentionLayer, rotary: Rotary) -> SelfAttention:
        config, names = self.config, ("q_proj", "k_proj", "v_proj")
        sizes = config.hidden_size, config.num_heads, config.num_heads, layer.head_dim
        qkv = QKVLinear(weights, names, *sizes, config.attention_bias, interleaved_dim=rotary_dim_of(config))
        return SelfAttention(layer, qkv, self.build_output(weights, config.num_heads * layer.head_dim), rotary)

    def build_cross_attention(self, weights: Weights, index: int) -> CrossAttention:
        config = self.config
        width, hidden, bias = config.num_heads * config.head_dim, config.hidden_size, config.attention_bias
        query = ColumnParallelLinear(weights / "q_proj", hidden, width, bias=bias)
        key_value = MergedLinear(weights, ("k_proj", "v_proj"), hidden, (width, width), bias)
        return CrossAttention(self.cross_layers[index], query, key_value, self.build_output(weights, width))

    def build_output(self, weights: Weights, width: int) -> RowParallelLinear:
        return RowParallelLinear(weights / "o_proj", width, self.config.hidden_size, bias=False)

    def build_norm(self, weights: Weights) -> LayerNorm:
        return LayerNorm(weights, self.config.hidden_size, self.config.norm_eps, has_bias=False)
