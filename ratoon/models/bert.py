"""BERT and models of the same shape (MiniLM): an encoder only, for embeddings. Heads for other tasks are not read."""

from __future__ import annotations

import torch

from ratoon.core.config import ModelConfig
from ratoon.layers.embedding import Embedding, VocabParallelEmbedding
from ratoon.layers.linear import ColumnParallelLinear, QKVLinear, RowParallelLinear
from ratoon.layers.mlp import MLP
from ratoon.layers.norm import LayerNorm
from ratoon.layers.weights import Weights
from ratoon.models.base import LanguageModel
from ratoon.models.decoder import SelfAttention
from ratoon.models.post_norm import PostNormLayer
from ratoon.models.text_input import TextInput

Tensor = torch.Tensor

# In files saved with a head: the tensors after the layers.
HEADS = (
    "cls.predictions.bias", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias",
    "cls.predictions.transform.dense.weight", "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight", "cls.predictions.transform.LayerNorm.bias",
    "cls.predictions.transform.LayerNorm.gamma", "cls.predictions.transform.LayerNorm.beta",
    "cls.seq_relationship.weight", "cls.seq_relationship.bias", "classifier.weight", "classifier.bias",
)  # fmt: skip


class BertModel(LanguageModel):
    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        super().__init__(config, weights)
        weights.ignore(*HEADS)
        model = weights / "bert" if weights.has("bert.embeddings.word_embeddings.weight") else weights
        model.ignore("pooler.dense.weight", "pooler.dense.bias")
        self.input = self.build_input(model.on_stages(first=True) / "embeddings")
        self.embed = self.input.tokens
        layers = model / "encoder" / "layer"
        self.layers = [self.build_layer(layers / index, place) for place, index in enumerate(self.layer_range)]
        self.final_norm = None

    def build_input(self, weights: Weights) -> TextInput:
        config, hidden = self.config, self.config.hidden_size
        weights.ignore("position_ids")  # older files store them
        tokens = VocabParallelEmbedding(weights / "word_embeddings", config.vocab_size, hidden)
        positions = Embedding(weights / "position_embeddings", config.max_position, hidden)
        types = Embedding(weights / "token_type_embeddings", config.num_token_types, hidden)
        positions.table = positions.table + types.table[0]  # every token is of the first type
        return TextInput(tokens, positions, self.build_norm(weights))

    def build_layer(self, weights: Weights, index: int) -> PostNormLayer:
        config, hidden = self.config, self.config.hidden_size
        attention = weights / "attention"
        names = ("query", "key", "value")
        qkv = QKVLinear(attention / "self", names, hidden, config.num_heads, config.num_heads, config.head_dim, True)
        output = RowParallelLinear(attention / "output" / "dense", hidden, hidden, bias=True)
        up = ColumnParallelLinear(weights / "intermediate" / "dense", hidden, config.intermediate_size, bias=True)
        down = RowParallelLinear(weights / "output" / "dense", config.intermediate_size, hidden, bias=True)
        return PostNormLayer(
            self.build_norm(attention / "output"),
            SelfAttention(self.attention_layers[index], qkv, output),
            self.build_norm(weights / "output"),
            MLP(up, down, weights.ops, config.activation),
        )

    def build_norm(self, weights: Weights) -> LayerNorm:
        return LayerNorm(weights / "LayerNorm", self.config.hidden_size, self.config.norm_eps)
