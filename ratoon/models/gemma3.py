"""Gemma 3: Gemma 2 with norms of query and key heads, and a rotation of its own in layers with a window; with an
encoder of pictures or without."""

from __future__ import annotations

from ratoon.core.config import ModelConfig
from ratoon.layers.norm import HeadRMSNorm
from ratoon.layers.weights import Weights
from ratoon.models.decoder import SelfAttention
from ratoon.models.gemma2 import Gemma2ForCausalLM
from ratoon.models.vision.gemma3 import Gemma3Encoder


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    def build_attention(self, weights: Weights, index: int) -> SelfAttention:
        attention, config = super().build_attention(weights, index), self.config
        attention.q_norm, attention.k_norm = (
            HeadRMSNorm(weights / name, config.head_dim, config.norm_eps, is_offset=True)
            for name in ("q_norm", "k_norm")
        )
        return attention


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """With pictures, whose rows see each other in both directions: that is in the attention of a step."""

    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        super().__init__(config, weights, max_position)
        assert config.media is not None
        if self.stage.is_first:
            is_below_model = weights.has("model.multi_modal_projector.mm_soft_emb_norm.weight")
            vision = (weights / "model" if is_below_model else weights).replicated().for_encoder()
            self.media_encoder = Gemma3Encoder(vision, config.media, config.hidden_size)

    def text_weights(self, weights: Weights) -> tuple[Weights, Weights]:
        if weights.has("model.language_model.embed_tokens.weight"):
            return weights / "model" / "language_model", weights / "lm_head"
        text = weights / "language_model"  # as files have it
        return text / "model", text / "lm_head"
