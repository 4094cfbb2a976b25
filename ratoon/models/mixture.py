"""Decoders with a mixture of experts in the place of the feed-forward half: Mixtral, the mixtures of Qwen2, Qwen3, OLMo
and GLM-4.5. Some layers may be dense, by the config. What an expert is made of is in layers/experts.py."""

from __future__ import annotations

import re
from dataclasses import replace

from ratoon.layers.experts import ExpertMLP, ExpertNames
from ratoon.layers.norm import HeadRMSNorm
from ratoon.layers.ops import ExpertGate, RoutingRule
from ratoon.layers.weights import Weights
from ratoon.models.base import StreamLayer
from ratoon.models.decoder import PreNormLayer, SelfAttention
from ratoon.models.llama import LlamaForCausalLM
from ratoon.models.olmo2 import Olmo2ForCausalLM
from ratoon.models.qwen3 import Qwen3ForCausalLM

# Of a layer that predicts further tokens: its product of an embedding and a state, in safetensors and in GGUF
PREDICTOR = re.compile(r"layers\.(\d+)\.(?:nextn\.)?eh_proj\.weight")


def ignore_predictors(body: Weights, num_layers: int) -> None:
    """Leaves out the layers behind the last that predict further tokens (`num_nextn_predict_layers`). Any other layer
    there is left over, as in every family."""
    names = (name.removeprefix(body.prefix) for name in body.source.shapes() if name.startswith(body.prefix))
    found = {int(match[1]) for name in names if (match := PREDICTOR.fullmatch(name))}
    for index in sorted(index for index in found if index >= num_layers):
        body.ignore_below(f"layers.{index}", "predict further tokens")


class MixtureForCausalLM(LlamaForCausalLM):
    """What these families share."""

    part = "mlp"  # of a layer's tensors
    names = ExpertNames()

    def build_layer(self, weights: Weights, index: int) -> StreamLayer:
        experts = self.config.experts
        if experts is None or not experts.is_in_layer(self.layer_range[index]):
            return super().build_layer(weights, index)
        return PreNormLayer(
            self.build_norm(weights / "input_layernorm"),
            self.build_attention(weights / "self_attn", index),
            self.build_norm(weights / "post_attention_layernorm"),
            self.build_experts(weights),
        )

    def build_experts(self, weights: Weights) -> ExpertMLP:
        config, experts = self.config, self.config.experts
        assert experts is not None
        rule = RoutingRule(
            experts.num_experts, experts.top_k, experts.scoring, experts.renormalise, experts.scale,
            experts.num_groups, experts.top_groups,
        )  # fmt: skip
        names = self.names if experts.shared_size else replace(self.names, shared=None)
        gate = ExpertGate(config.activation)
        if experts.gate_limit is not None:
            gate = ExpertGate("clamped_swiglu", experts.gate_limit)
        return ExpertMLP(
            weights / self.part, config.hidden_size, experts.inner_size, rule, names, experts.shared_size,
            config.mlp_bias, gate,
        )  # fmt: skip


class MixtralForCausalLM(MixtureForCausalLM):
    """Its files have names of their own; those whose experts are fused have the usual ones."""

    part = "block_sparse_moe"
    names = ExpertNames(projections=("w1", "w3", "w2"))

    def build_experts(self, weights: Weights) -> ExpertMLP:
        if not weights.has(f"{self.part}.gate.weight"):
            self.part, self.names = "mlp", ExpertNames()
        return super().build_experts(weights)


class Qwen2MoeForCausalLM(MixtureForCausalLM):
    names = ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate")


class Qwen3MoeForCausalLM(MixtureForCausalLM, Qwen3ForCausalLM):
    pass


class OlmoeForCausalLM(MixtureForCausalLM, Olmo2ForCausalLM):
    """The attention of OLMo 2, with norms before each half of a layer."""


class Glm4MoeForCausalLM(MixtureForCausalLM):
    """GLM-4.5: the first layers are dense. Layers behind the last, which predict further tokens, are left out."""

    names = ExpertNames(choice_bias="gate.e_score_correction_bias", shared="shared_experts")

    def find_body(self, weights: Weights) -> Weights:
        body = weights / "model"
        ignore_predictors(body, self.config.num_layers)
        return body

    def build_attention(self, weights: Weights, index: int) -> SelfAttention:
        attention = super().build_attention(weights, index)
        if self.config.head_norms:
            sizes = self.config.head_dim, self.config.norm_eps
            attention.q_norm = HeadRMSNorm(weights / "q_norm", *sizes)
            attention.k_norm = HeadRMSNorm(weights / "k_norm", *sizes)
        return attention
