"""GPT-2: learned positions, layer norms, fused query-key-value, weights stored as [in, out], tied head."""

from __future__ import annotations

import torch

from ratoon.core.config import ModelConfig
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.embedding import Embedding, LMHead, RowEmbeddings, VocabParallelEmbedding, embed_rows
from ratoon.layers.linear import ColumnParallelLinear, QKVLinear, RowParallelLinear
from ratoon.layers.mlp import MLP
from ratoon.layers.norm import LayerNorm
from ratoon.layers.weights import Weights
from ratoon.models.base import LanguageModel
from ratoon.models.decoder import PreNormLayer, SelfAttention

Tensor = torch.Tensor


class GPT2LMHeadModel(LanguageModel):
    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        super().__init__(config, weights)
        # Files saved from the model without its head have no prefix; the first GPT-2 of the hub is one.
        model = weights / "transformer" if weights.has("transformer.wte.weight") else weights
        self.embed = VocabParallelEmbedding(
            model.on_stages(first=True, last=config.tie_word_embeddings) / "wte", config.vocab_size, config.hidden_size
        )
        self.embed_positions = Embedding(model.on_stages(first=True) / "wpe", config.max_position, config.hidden_size)
        self.layers = [self.build_layer(model / "h" / index, place) for place, index in enumerate(self.layer_range)]
        self.final_norm = LayerNorm(model.on_stages(last=True) / "ln_f", config.hidden_size, config.norm_eps)
        self.lm_head = LMHead(weights.on_stages(last=True) / "lm_head", self.embed, config.tie_word_embeddings)

    def embed_tokens(
        self,
        input_ids: Tensor,
        positions: Tensor,
        embeddings: RowEmbeddings | None = None,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        return embed_rows(self.embed(input_ids, adapters), embeddings).add_(self.embed_positions(positions))

    def build_layer(self, weights: Weights, index: int) -> PreNormLayer:
        config, hidden = self.config, self.config.hidden_size
        mlp = weights / "mlp"
        up = ColumnParallelLinear(mlp / "c_fc", hidden, config.intermediate_size, bias=True, transposed=True)
        down = RowParallelLinear(mlp / "c_proj", config.intermediate_size, hidden, bias=True, transposed=True)
        return PreNormLayer(
            LayerNorm(weights / "ln_1", hidden, config.norm_eps),
            self.build_attention(weights / "attn", index),
            LayerNorm(weights / "ln_2", hidden, config.norm_eps),
            MLP(up, down, weights.ops, config.activation),
        )

    def build_attention(self, weights: Weights, index: int) -> SelfAttention:
        config, hidden = self.config, self.config.hidden_size
        weights.ignore("bias", "masked_bias")  # causal masks that older files store
        qkv = QKVLinear(
            weights, ("c_attn",), hidden, config.num_heads, config.num_kv_heads, config.head_dim, True, transposed=True
        )
        output = RowParallelLinear(weights / "c_proj", hidden, hidden, bias=True, transposed=True)
        return SelfAttention(self.attention_layers[index], qkv, output)
