"""Qwen2-VL and Qwen2.5-VL: Qwen2 whose heads are rotated by time, height and width, and an encoder of pictures and
video. Rows of embeddings take the place of placeholder tokens, which is the runner's work."""

from __future__ import annotations

from ratoon.core.config import ModelConfig
from ratoon.layers.weights import Weights
from ratoon.models.qwen2 import Qwen2ForCausalLM
from ratoon.models.vision.qwen2_5_vl import Qwen2_5_VLEncoder
from ratoon.models.vision.qwen2_vl import Qwen2VLEncoder

PUBLISHED = "visual.patch_embed.proj.weight"  # in published files, and not where names are those of modules


class Qwen2VLForConditionalGeneration(Qwen2ForCausalLM):
    encoder_class = Qwen2VLEncoder

    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        super().__init__(config, weights, max_position)
        assert config.media is not None
        if self.stage.is_first:
            visual = weights / "visual" if weights.has(PUBLISHED) else weights / "model" / "visual"
            self.media_encoder = self.encoder_class(visual.replicated().for_encoder(), config.media, config.hidden_size)

    def find_body(self, weights: Weights) -> Weights:
        model = weights / "model"
        return model if weights.has(PUBLISHED) else model / "language_model"


class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):
    encoder_class = Qwen2_5_VLEncoder
