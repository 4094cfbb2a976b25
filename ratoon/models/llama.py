"""Llama, and the families with its structure and tensor names: RMS norm, rotary positions, gated MLP.

Mistral is Llama with a sliding window, which the config carries.
"""

from __future__ import annotations

from ratoon.core.config import ModelConfig
from ratoon.layers.embedding import LMHead, VocabParallelEmbedding
from ratoon.layers.linear import QKVLinear, RowParallelLinear
from ratoon.layers.mlp import FeedForward, GatedMLP
from ratoon.layers.norm import LayerNorm, RMSNorm
from ratoon.layers.rotary import Rotary
from ratoon.layers.weights import Weights
from ratoon.models.base import LanguageModel, StreamLayer
from ratoon.models.decoder import PreNormLayer, SelfAttention
from ratoon.models.heads import ClassifierHead, Dense


class LlamaForCausalLM(LanguageModel):
    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        super().__init__(config, weights)
        model = self.find_body(weights)
        model.ignore("rotary_emb.inv_freq")
        self.rotary = Rotary(weights, config, max_position)
        is_tied = self.has_tied_head(weights)
        self.embed = VocabParallelEmbedding(
            model.on_stages(first=True, last=is_tied) / "embed_tokens",
            config.vocab_size,
            config.hidden_size,
        )
        layers = model / "layers"
        self.layers = [self.build_layer(layers / index, place) for place, index in enumerate(self.layer_range)]
        self.final_norm = self.build_norm(model.on_stages(last=True) / "norm")
        self.build_head(self.find_head(weights).on_stages(last=True), is_tied)

    def build_head(self, weights: Weights, is_tied: bool) -> None:
        """The head over the vocabulary, or that over labels, or none."""
        config = self.config
        if config.has_lm_head:
            head = weights / "lm_head"
            self.lm_head = LMHead(head, self.embed, is_tied, multiplier=config.logits_multiplier)
            return
        (weights / "lm_head").ignore("weight")  # what files may have beside
        if config.classifier is None:
            (weights / "score").ignore("weight")
        else:
            whole, num_labels = weights.replicated() / "score", len(config.classifier.labels)
            self.classifier = ClassifierHead(Dense(whole, config.hidden_size, num_labels, bias=False), weights.dtype)

    def find_body(self, weights: Weights) -> Weights:
        """Everything but the head. Files of models without one may have no prefix."""
        has_prefix = self.config.has_lm_head or weights.has("model.embed_tokens.weight")
        return weights / "model" if has_prefix else weights

    def find_head(self, weights: Weights) -> Weights:
        """The view below which the head is."""
        return weights

    def has_tied_head(self, weights: Weights) -> bool:
        return self.config.has_lm_head and self.config.tie_word_embeddings

    def build_norm(self, weights: Weights) -> RMSNorm | LayerNorm:
        return RMSNorm(weights, self.config.hidden_size, self.config.norm_eps)

    def build_layer(self, weights: Weights, index: int) -> StreamLayer:
        return PreNormLayer(
            self.build_norm(weights / "input_layernorm"),
            self.build_attention(weights / "self_attn", index),
            self.build_norm(weights / "post_attention_layernorm"),
            self.build_mlp(weights / "mlp"),
        )

    def build_mlp(self, weights: Weights) -> FeedForward:
        config = self.config
        return GatedMLP(weights, config.hidden_size, config.intermediate_size, config.mlp_bias, config.activation)

    def build_attention(self, weights: Weights, index: int) -> SelfAttention:
        weights.ignore("rotary_emb.inv_freq")  # older files store it in every layer
        qkv = self.build_qkv(weights, self.config.attention_bias)
        return SelfAttention(self.attention_layers[index], qkv, self.build_output(weights), self.rotary)

    def build_qkv(self, weights: Weights, bias: bool) -> QKVLinear:
        config = self.config
        names = ("q_proj", "k_proj", "v_proj")
        return QKVLinear(
            weights, names, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, bias
        )

    def build_output(self, weights: Weights) -> RowParallelLinear:
        config = self.config
        width = config.num_heads * config.head_dim
        return RowParallelLinear(weights / "o_proj", width, config.hidden_size, config.attention_output_bias)
