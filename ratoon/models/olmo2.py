"""OLMo 2: Llama with norms behind attention and feed-forward instead of before them, and norms over all query heads and
over all key heads together."""

from __future__ import annotations

from ratoon.core.errors import ModelError
from ratoon.layers.norm import RMSNorm, WholeRMSNorm
from ratoon.layers.weights import Weights
from ratoon.models.base import StreamLayer
from ratoon.models.decoder import NormedUpdateLayer, SelfAttention
from ratoon.models.llama import LlamaForCausalLM


class Olmo2ForCausalLM(LlamaForCausalLM):
    def build_layer(self, weights: Weights, index: int) -> StreamLayer:
        size, eps = self.config.hidden_size, self.config.norm_eps
        return NormedUpdateLayer(
            self.build_attention(weights / "self_attn", index),
            RMSNorm(weights / "post_attention_layernorm", size, eps),
            self.build_mlp(weights / "mlp"),
            RMSNorm(weights / "post_feedforward_layernorm", size, eps),
            weights.ops.add,
        )

    def build_attention(self, weights: Weights, index: int) -> SelfAttention:
        attention = super().build_attention(weights, index)
        counts = self.config.num_heads, self.config.num_kv_heads
        q_norm, k_norm = (
            self._build_whole_norm(weights / name, count, own)
            for name, count, own in zip(("q_norm", "k_norm"), counts, weights.shard.cut_heads(*counts))
        )
        attention.whole_norms = q_norm, k_norm
        return attention

    def _build_whole_norm(self, weights: Weights, num_heads: int, own: range) -> WholeRMSNorm:
        dim = self.config.head_dim
        if weights.shard.world_size > num_heads:
            problem = f"{num_heads} key heads are normed together, and each is on several ranks"
            raise ModelError("tensor parallel", problem, f"at most {num_heads} ranks")
        return WholeRMSNorm(weights, num_heads * dim, range(own.start * dim, own.stop * dim), self.config.norm_eps)
