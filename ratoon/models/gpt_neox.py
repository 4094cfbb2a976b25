"""GPT-NeoX and Pythia: layer norms, attention and feed-forward side by side or one after the other, a rotation of a
part of each head, and one layer of the checkpoint with query, key and value head by head. Falcon (falcon.py) is built
on it."""

from __future__ import annotations

from ratoon.core.config import ModelConfig
from ratoon.layers.embedding import LMHead, VocabParallelEmbedding
from ratoon.layers.linear import ColumnParallelLinear, QKVLinear, RowParallelLinear
from ratoon.layers.mlp import MLP
from ratoon.layers.norm import LayerNorm
from ratoon.layers.rotary import Rotary
from ratoon.layers.weights import Weights
from ratoon.models.base import LanguageModel, StreamLayer
from ratoon.models.decoder import ParallelLayer, PreNormLayer, SelfAttention


class GPTNeoXForCausalLM(LanguageModel):
    # The names of the checkpoint's parts
    body, table, stack, last_norm, attention = "gpt_neox", "embed_in", "layers", "final_layer_norm", "attention"

    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        super().__init__(config, weights)
        model, tied = weights / self.body, config.tie_word_embeddings
        self.rotary = Rotary(weights, config, max_position)
        self.embed = VocabParallelEmbedding(
            model.on_stages(first=True, last=tied) / self.table, config.vocab_size, config.hidden_size
        )
        layers = model / self.stack
        self.layers = [self.build_layer(layers / index, place) for place, index in enumerate(self.layer_range)]
        self.final_norm = self.build_norm(model.on_stages(last=True) / self.last_norm)
        head = "embed_out" if weights.has("embed_out.weight") else "lm_head"
        self.lm_head = LMHead(weights.on_stages(last=True) / head, self.embed, tied)

    def build_norm(self, weights: Weights) -> LayerNorm:
        return LayerNorm(weights, self.config.hidden_size, self.config.norm_eps)

    def build_layer(self, weights: Weights, index: int) -> StreamLayer:
        attention, mlp = self.build_attention(weights / self.attention, index), self.build_mlp(weights / "mlp")
        before, between = self.build_norms(weights)
        if self.config.parallel_residual:
            return ParallelLayer(before, attention, between, mlp, weights.ops.add)
        return PreNormLayer(before, attention, between, mlp)

    def build_norms(self, weights: Weights) -> tuple[LayerNorm, LayerNorm]:
        """Builds the norms before attention and before the feed-forward half."""
        return self.build_norm(weights / "input_layernorm"), self.build_norm(weights / "post_attention_layernorm")

    def build_attention(self, weights: Weights, index: int) -> SelfAttention:
        config = self.config
        weights.ignore("bias", "masked_bias", "rotary_emb.inv_freq")  # what older files store
        sizes = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        qkv = QKVLinear(weights, ("query_key_value",), *sizes, config.attention_bias, by_kv_head=True)
        width = config.num_heads * config.head_dim
        output = RowParallelLinear(weights / "dense", width, config.hidden_size, config.attention_output_bias)
        return SelfAttention(self.attention_layers[index], qkv, output, self.rotary)

    def build_mlp(self, weights: Weights) -> MLP:
        config, size = self.config, self.config.hidden_size
        up = ColumnParallelLinear(weights / "dense_h_to_4h", size, config.intermediate_size, config.mlp_bias)
        down = RowParallelLinear(weights / "dense_4h_to_h", config.intermediate_size, size, config.mlp_bias)
        return MLP(up, down, weights.ops, config.activation)
