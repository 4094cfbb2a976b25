"""BERT and models of the same shape (MiniLM): an encoder only, for vectors, and with a head for labels and scores.

RoBERTa and DistilBERT (roberta.py) are built on it.
"""

from __future__ import annotations

from ratoon.core.config import ModelConfig
from ratoon.layers.embedding import Embedding, VocabParallelEmbedding
from ratoon.layers.linear import ColumnParallelLinear, QKVLinear, RowParallelLinear
from ratoon.layers.mlp import MLP
from ratoon.layers.norm import LayerNorm
from ratoon.layers.weights import Weights
from ratoon.models.base import LanguageModel
from ratoon.models.decoder import SelfAttention
from ratoon.models.heads import ClassifierHead, Dense, activation_of
from ratoon.models.post_norm import PostNormLayer
from ratoon.models.text_input import TextInput, TypedInput

# In files saved with a head for another task: the tensors after the layers.
HEADS = (
    "cls.predictions.bias", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias",
    "cls.predictions.transform.dense.weight", "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight", "cls.predictions.transform.LayerNorm.bias",
    "cls.predictions.transform.LayerNorm.gamma", "cls.predictions.transform.LayerNorm.beta",
    "cls.seq_relationship.weight", "cls.seq_relationship.bias", "classifier.weight", "classifier.bias",
)  # fmt: skip


class BertModel(LanguageModel):
    body, stack = "bert", ("encoder", "layer")  # the names of the checkpoint's parts
    heads: tuple[str, ...] = HEADS

    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        super().__init__(config, weights)
        has_body = weights.has(f"{self.body}.embeddings.word_embeddings.weight")
        model = weights / self.body if has_body else weights
        self.input = self.build_input(model.on_stages(first=True) / "embeddings")
        self.embed = self.input.tokens
        layers = model.for_encoder()
        for name in self.stack:
            layers = layers / name
        self.layers = [self.build_layer(layers / index, place) for place, index in enumerate(self.layer_range)]
        self.final_norm = None
        if config.classifier is None:
            weights.ignore(*self.heads)
        else:
            self.classifier = self.build_head(weights.on_stages(last=True).replicated(), model)
        model.ignore("pooler.dense.weight", "pooler.dense.bias")

    def build_head(self, weights: Weights, model: Weights) -> ClassifierHead:
        """The pooler of the body, and a product."""
        pooler = model.on_stages(last=True).replicated() / "pooler" / "dense"
        return self.assemble_head(weights, pooler, weights / "classifier")

    def assemble_head(self, weights: Weights, dense: Weights, out: Weights) -> ClassifierHead:
        config, size = self.config, self.config.hidden_size
        assert config.classifier is not None
        return ClassifierHead(
            Dense(out, size, len(config.classifier.labels)),
            weights.dtype,
            Dense(dense, size, size),
            activation_of(weights, config.classifier.dense_activation),
        )

    def build_input(self, weights: Weights) -> TextInput:
        config, hidden = self.config, self.config.hidden_size
        weights.ignore("position_ids", "token_type_ids")  # older files store them
        tokens = VocabParallelEmbedding(weights / "word_embeddings", config.vocab_size, hidden)
        positions = Embedding(weights / "position_embeddings", config.max_position, hidden, config.num_unused_positions)
        norm = self.build_norm(weights / "LayerNorm")
        if not config.num_token_types:
            return TextInput(tokens, positions, norm)
        types = Embedding(weights / "token_type_embeddings", config.num_token_types, hidden).table
        positions.table = positions.table + types[0]  # most tokens are of the first type
        if config.num_token_types == 1:
            return TextInput(tokens, positions, norm)
        return TypedInput(tokens, positions, norm, types - types[0])

    def build_layer(self, weights: Weights, index: int) -> PostNormLayer:
        attention = weights / "attention"
        return self.assemble_layer(
            index,
            (attention / "self", ("query", "key", "value")),
            (attention / "output" / "dense", attention / "output" / "LayerNorm"),
            (weights / "intermediate" / "dense", weights / "output" / "dense", weights / "output" / "LayerNorm"),
        )

    def assemble_layer(
        self,
        index: int,
        qkv: tuple[Weights, tuple[str, str, str]],
        output: tuple[Weights, Weights],
        feed_forward: tuple[Weights, Weights, Weights],
    ) -> PostNormLayer:
        """A layer from where its parts are: query, key and value; the product behind attention, and its norm; both
        products of the feed-forward half, and its norm."""
        config, hidden, inner = self.config, self.config.hidden_size, self.config.intermediate_size
        fused = QKVLinear(*qkv, hidden, config.num_heads, config.num_heads, config.head_dim, True)
        attended = RowParallelLinear(output[0], hidden, hidden, bias=True)
        up = ColumnParallelLinear(feed_forward[0], hidden, inner, bias=True)
        down = RowParallelLinear(feed_forward[1], inner, hidden, bias=True)
        return PostNormLayer(
            self.build_norm(output[1]),
            SelfAttention(self.attention_layers[index], fused, attended),
            self.build_norm(feed_forward[2]),
            MLP(up, down, feed_forward[0].ops, config.activation),
        )

    def build_norm(self, weights: Weights) -> LayerNorm:
        return LayerNorm(weights, self.config.hidden_size, self.config.norm_eps)
