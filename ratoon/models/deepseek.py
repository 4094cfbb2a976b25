"""DeepSeek-V2 and V3: latent attention (latent.py), and mixtures of experts behind dense first layers."""

from __future__ import annotations

from ratoon.layers.experts import ExpertNames
from ratoon.layers.weights import Weights
from ratoon.models.base import StreamLayer
from ratoon.models.decoder import PreNormLayer
from ratoon.models.latent import build_latent
from ratoon.models.mixture import MixtureForCausalLM, ignore_predictors


class DeepseekV2ForCausalLM(MixtureForCausalLM):
    """Layers behind the last, which predict further tokens, are left out."""

    names = ExpertNames(shared="shared_experts", exact_router=True)

    def find_body(self, weights: Weights) -> Weights:
        body = weights / "model"
        ignore_predictors(body, self.config.num_layers)
        return body

    def build_layer(self, weights: Weights, index: int) -> StreamLayer:
        experts = self.config.experts
        has_experts = experts is not None and experts.is_in_layer(self.layer_range[index])
        return PreNormLayer(
            self.build_norm(weights / "input_layernorm"),
            build_latent(weights / "self_attn", self.config, self.attention_layers[index], self.rotary),
            self.build_norm(weights / "post_attention_layernorm"),
            self.build_experts(weights) if has_experts else self.build_mlp(weights / "mlp"),
        )


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """The experts of a row are chosen by sigmoids of the router's logits, to which a bias is added for the choice."""

    names = ExpertNames(choice_bias="gate.e_score_correction_bias", shared="shared_experts")
