"""Idefics3 and SmolVLM: Llama, and an encoder of tiles of pictures. Rows of embeddings take the place of placeholder
tokens, which is the runner's work."""

from __future__ import annotations

from ratoon.core.config import ModelConfig
from ratoon.layers.weights import Weights
from ratoon.models.llama import LlamaForCausalLM
from ratoon.models.vision.idefics3 import Idefics3Encoder


class Idefics3ForConditionalGeneration(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        super().__init__(config, weights, max_position)
        assert config.media is not None
        if self.stage.is_first:
            self.media_encoder = Idefics3Encoder(
                (weights / "model").replicated().for_encoder(), config.media, config.hidden_size
            )

    def find_body(self, weights: Weights) -> Weights:
        return weights / "model" / "text_model"
