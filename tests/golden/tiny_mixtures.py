"""Small random mixtures of experts, as tiny_models.py has other families. Their tensors have the experts of a layer
fused, as transformers has them in memory; files have them apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformers

from ratoon.core.config import ExpertConfig
from ratoon.models.expert_source import ExpertSource
from tests.golden.tiny_models import TinyModel, make_tiny, plain_config, shared_arguments

EXPERTS, TOP_K, INNER = 6, 2, 40


def tiny_mixtral(window: int | None = None, inner: int | None = None, seed: int = 0) -> TinyModel:
    config = plain_config("MixtralForCausalLM", 4, 2)
    config = config if inner is None else replace(config, intermediate_size=inner)
    experts = ExpertConfig(EXPERTS, TOP_K, config.intermediate_size, renormalise=True)
    config = replace(config, experts=experts, sliding_window=window)
    arguments = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "sliding_window": window}
    oracle_config = transformers.MixtralConfig(**shared_arguments(config), **arguments)
    return experts_apart(make_tiny(transformers.MixtralForCausalLM, oracle_config, config, seed))


def tiny_qwen2_moe(renormalise: bool = False, dense: bool = True, seed: int = 0) -> TinyModel:
    """Its first layer is `dense`, by name; it has a shared expert with a gate."""
    layers = (False, True, True) if dense else None
    experts = ExpertConfig(EXPERTS, TOP_K, INNER, layers, renormalise=renormalise, shared_size=24)
    config = replace(plain_config("Qwen2MoeForCausalLM", 4, 2), attention_bias=True, experts=experts)
    oracle_config = transformers.Qwen2MoeConfig(
        **shared_arguments(config), **_qwen_arguments(experts), mlp_only_layers=[0] if dense else [],
        shared_expert_intermediate_size=24,
    )  # fmt: skip
    return experts_apart(make_tiny(transformers.Qwen2MoeForCausalLM, oracle_config, config, seed))


def tiny_qwen3_moe(renormalise: bool = True, step: int = 1, head_dim: int = 24, seed: int = 0) -> TinyModel:
    """`step`: layers whose number is no multiple of it are dense."""
    layers = tuple((layer + 1) % step == 0 for layer in range(3))
    experts = ExpertConfig(EXPERTS, TOP_K, INNER, None if all(layers) else layers, renormalise=renormalise)
    config = replace(plain_config("Qwen3MoeForCausalLM", 4, 2, head_dim=head_dim), experts=experts)
    oracle_config = transformers.Qwen3MoeConfig(
        **shared_arguments(config), **_qwen_arguments(experts), decoder_sparse_step=step, head_dim=head_dim
    )
    return experts_apart(make_tiny(transformers.Qwen3MoeForCausalLM, oracle_config, config, seed))


def tiny_olmoe(renormalise: bool = False, seed: int = 0) -> TinyModel:
    config = plain_config("OlmoeForCausalLM", 4, 2)
    experts = ExpertConfig(EXPERTS, TOP_K, config.intermediate_size, renormalise=renormalise)
    config = replace(config, experts=experts)
    oracle_config = transformers.OlmoeConfig(
        **shared_arguments(config), num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=renormalise,
    )  # fmt: skip
    return experts_apart(make_tiny(transformers.OlmoeForCausalLM, oracle_config, config, seed))


def tiny_glm4_moe(groups: int = 1, head_norms: bool = False, seed: int = 0) -> TinyModel:
    """`groups`: of experts, of which half are chosen from."""
    top_groups = max(groups // 2, 1)
    experts = ExpertConfig(
        8, 3, INNER, (False, True, True), scoring="sigmoid", renormalise=True, scale=1.5, num_groups=groups,
        top_groups=top_groups, shared_size=2 * INNER,
    )  # fmt: skip
    config = replace(
        plain_config("Glm4MoeForCausalLM", 4, 2, head_dim=32), experts=experts, rotary_dim=16, attention_bias=True,
        head_norms=head_norms,
    )  # fmt: skip
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    oracle_config = transformers.Glm4MoeConfig(
        **shared_arguments(config, rope), head_dim=32, attention_bias=True, use_qk_norm=head_norms,
        n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=INNER, n_shared_experts=2,
        routed_scaling_factor=1.5, n_group=groups, topk_group=top_groups, norm_topk_prob=True,
        first_k_dense_replace=1,
    )  # fmt: skip
    return experts_apart(
        with_choice_bias(make_tiny(transformers.Glm4MoeForCausalLM, oracle_config, config, seed), seed)
    )


def tiny_gpt_oss(
    window: int | None = 6,
    limit: float = 0.6,
    inner: int | None = None,
    rope: dict[str, Any] | None = None,
    seed: int = 0,
) -> TinyModel:
    """Every other layer has the window. Numbers reach the limit of gates, and sinks take a share of each softmax."""
    sliding = (True, False, True)
    config = plain_config("GptOssForCausalLM", 4, 2)
    config = config if inner is None else replace(config, intermediate_size=inner)
    experts = ExpertConfig(EXPERTS, TOP_K, config.intermediate_size, renormalise=True, gate_limit=limit)
    config = replace(
        config, experts=experts, attention_bias=True, attention_output_bias=True, mlp_bias=True, attention_sinks=True,
        sliding_window=window, sliding_layers=None if window is None else sliding,
    )  # fmt: skip
    kinds = ["sliding_attention" if is_sliding and window else "full_attention" for is_sliding in sliding]
    oracle_config = transformers.GptOssConfig(
        **shared_arguments(config, rope or {"rope_type": "default"}), head_dim=config.head_dim,
        num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, swiglu_limit=limit, sliding_window=window,
        layer_types=kinds,
    )  # fmt: skip
    tiny = make_tiny(transformers.GptOssForCausalLM, oracle_config, config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in tiny.oracle.state_dict().items():
            if name.endswith("_bias"):  # of experts, in which a fresh model has nothing
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return experts_apart(tiny, interleaved=True)


def _qwen_arguments(experts: ExpertConfig) -> dict[str, Any]:
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.inner_size,
        "norm_topk_prob": experts.renormalise,
    }


def with_choice_bias(tiny: TinyModel, seed: int) -> TinyModel:
    """The biases of routers are zero at first, and no parameters."""
    for name, tensor in tiny.oracle.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * 0.2)
    return tiny


def experts_apart(tiny: TinyModel, interleaved: bool = False) -> TinyModel:
    return tiny._replace(source=ExpertSource(tiny.source, interleaved))  # type: ignore[arg-type]


# One of each family, and of each form that differs
MIXTURES: dict[str, Callable[[], TinyModel]] = {
    "mixtral": tiny_mixtral,
    "mixtral with a window": lambda: tiny_mixtral(window=6),
    "qwen2_moe": tiny_qwen2_moe,
    "qwen3_moe": tiny_qwen3_moe,
    "qwen3_moe with dense layers": lambda: tiny_qwen3_moe(renormalise=False, step=2),
    "olmoe": tiny_olmoe,
    "glm4_moe": tiny_glm4_moe,
    "glm4_moe with groups and norms of heads": lambda: tiny_glm4_moe(groups=4, head_norms=True),
    "gpt_oss": tiny_gpt_oss,
}
