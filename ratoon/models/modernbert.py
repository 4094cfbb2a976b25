"""ModernBERT: an encoder with norms before the halves of a layer, gated feed-forward, and a rotation; most layers see a
window to both sides, and rotate by another base than the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ratoon.core.config import ModelConfig, RopeScaling
from ratoon.layers.embedding import VocabParallelEmbedding
from ratoon.layers.linear import QKVLinear, RowParallelLinear
from ratoon.layers.mlp import GatedMLP
from ratoon.layers.norm import LayerNorm, LinearInput
from ratoon.layers.rotary import Rotary
from ratoon.layers.weights import Weights
from ratoon.models.base import LanguageModel
from ratoon.models.decoder import PreNormLayer, SelfAttention
from ratoon.models.heads import ClassifierHead, Dense, activation_of
from ratoon.models.text_input import TextInput

Tensor = torch.Tensor

HEADS = ("head.dense.weight", "head.dense.bias", "head.norm.weight", "head.norm.bias", "decoder.weight",
         "decoder.bias", "classifier.weight", "classifier.bias")  # fmt: skip


@dataclass(slots=True, eq=False)
class NoNorm:
    """In the place of the first layer's norm: the embeddings are normed already."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return x if residual is None else residual.add_(x)

    def before_product(self, stream: Tensor, update: Tensor | None) -> LinearInput:
        assert update is None, "the first layer is behind no other"
        return stream


class ModernBertModel(LanguageModel):
    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        super().__init__(config, weights)
        model = weights / "model" if weights.has("model.embeddings.tok_embeddings.weight") else weights
        first = model.on_stages(first=True) / "embeddings"
        self.embed = VocabParallelEmbedding(first / "tok_embeddings", config.vocab_size, config.hidden_size)
        self.input = TextInput(self.embed, None, self.build_norm(first / "norm"))
        self.rotary = self.local_rotary = Rotary(weights, config, max_position)
        if config.local_rope_theta is not None:
            local = replace(config, rope_theta=config.local_rope_theta, rope_scaling=RopeScaling())
            self.local_rotary = Rotary(weights, local, max_position)
        layers = model.for_encoder() / "layers"
        self.layers = [self.build_layer(layers / index, place) for place, index in enumerate(self.layer_range)]
        self.final_norm = self.build_norm(model.on_stages(last=True) / "final_norm")
        if config.classifier is None:
            weights.ignore(*HEADS)
        else:
            self.classifier = self.build_head(weights.on_stages(last=True).replicated())

    def build_norm(self, weights: Weights) -> LayerNorm:
        return LayerNorm(weights, self.config.hidden_size, self.config.norm_eps, self.config.norm_bias)

    def build_layer(self, weights: Weights, index: int) -> PreNormLayer:
        config = self.config
        is_first = self.layer_range[index] == 0
        return PreNormLayer(
            NoNorm() if is_first else self.build_norm(weights / "attn_norm"),
            self.build_attention(weights / "attn", index),
            self.build_norm(weights / "mlp_norm"),
            GatedMLP(
                weights / "mlp", config.hidden_size, config.intermediate_size, config.mlp_bias, config.activation,
                ("Wi", "Wo"),
            ),
        )  # fmt: skip

    def build_attention(self, weights: Weights, index: int) -> SelfAttention:
        config, hidden = self.config, self.config.hidden_size
        sizes = hidden, config.num_heads, config.num_heads, config.head_dim
        qkv = QKVLinear(weights, ("Wqkv",), *sizes, config.attention_bias)
        output = RowParallelLinear(weights / "Wo", hidden, hidden, config.attention_output_bias)
        layer = self.attention_layers[index]
        return SelfAttention(layer, qkv, output, self.rotary if layer.window is None else self.local_rotary)

    def build_head(self, weights: Weights) -> ClassifierHead:
        size, classifier = self.config.hidden_size, self.config.classifier
        assert classifier is not None
        head = weights / "head"
        return ClassifierHead(
            Dense(weights / "classifier", size, len(classifier.labels)),
            weights.dtype,
            Dense(head / "dense", size, size, classifier.dense_bias),
            activation_of(weights, classifier.dense_activation),
            self.build_norm(head / "norm"),
        )
