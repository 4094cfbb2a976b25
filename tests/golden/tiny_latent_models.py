"""Small random models with latent attention, as tiny_models.py has other families."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import transformers

from ratoon.core.config import ExpertConfig, LatentConfig, ModelConfig, RopeScaling
from tests.golden.tiny_mixtures import experts_apart, with_choice_bias
from tests.golden.tiny_models import TinyModel, make_tiny, plain_config, shared_arguments

EXPERTS, TOP_K, INNER, SCALE = 8, 3, 40, 1.5
KV_RANK, ROPE, NOPE, VALUE = 48, 16, 24, 32


def tiny_deepseek_v2(
    q_rank: int | None = None,
    groups: int = 1,
    yarn: bool = False,
    bias: bool = False,
    mscale: float = 0.707,
    seed: int = 0,
) -> TinyModel:
    """Its first layer is dense. `groups`: of experts, of which half are chosen from."""
    experts = ExpertConfig(EXPERTS, TOP_K, INNER, (False, True, True), scale=SCALE, shared_size=2 * INNER)
    arguments: dict[str, Any] = {}
    if groups > 1:
        experts = replace(experts, num_groups=groups, top_groups=groups // 2)
        arguments = {"topk_method": "group_limited_greedy", "n_group": groups, "topk_group": groups // 2}
    config, shared = _latent_config("DeepseekV2ForCausalLM", experts, q_rank, yarn, bias, mscale)
    oracle_config = transformers.DeepseekV2Config(**shared, **arguments)
    return experts_apart(make_tiny(transformers.DeepseekV2ForCausalLM, oracle_config, config, seed))


def tiny_deepseek_v3(
    q_rank: int | None = 20, groups: int = 4, yarn: bool = False, interleaved: bool = True, seed: int = 0
) -> TinyModel:
    top_groups = max(groups // 2, 1)
    experts = ExpertConfig(
        EXPERTS, TOP_K, INNER, (False, True, True), scoring="sigmoid", renormalise=True, scale=SCALE,
        num_groups=groups, top_groups=top_groups, shared_size=2 * INNER,
    )  # fmt: skip
    config, shared = _latent_config("DeepseekV3ForCausalLM", experts, q_rank, yarn, bias=False)
    oracle_config = transformers.DeepseekV3Config(
        **shared, n_group=groups, topk_group=top_groups, norm_topk_prob=True, rope_interleave=interleaved
    )
    config = replace(config, interleaved_rotary=interleaved)
    tiny = make_tiny(transformers.DeepseekV3ForCausalLM, oracle_config, config, seed)
    return experts_apart(with_choice_bias(tiny, seed))


def _latent_config(
    architecture: str, experts: ExpertConfig, q_rank: int | None, yarn: bool, bias: bool, mscale: float = 0.707
) -> tuple[ModelConfig, dict[str, Any]]:
    """The config, and the arguments of the one of transformers."""
    rope: dict[str, Any] = {"rope_type": "default"}
    scaling, scale = RopeScaling(), (NOPE + ROPE) ** -0.5
    if yarn:
        numbers = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": mscale, "mscale_all_dim": 1.2}
        rope = {"rope_type": "yarn", "original_max_position_embeddings": 32, **numbers}
        scaling = RopeScaling(kind="yarn", original_max_position=32, **numbers)
        scale *= (0.1 * 1.2 * math.log(4.0) + 1.0) ** 2
    config = replace(
        plain_config(architecture, 4, 1, head_dim=KV_RANK + ROPE), experts=experts, rotary_dim=ROPE,
        attention_scale=scale, rope_scaling=scaling, interleaved_rotary=True, attention_bias=bias,
        attention_output_bias=bias, latent=LatentConfig(KV_RANK, ROPE, NOPE, VALUE, q_rank),
    )  # fmt: skip
    arguments = {
        **shared_arguments(config, rope), "kv_lora_rank": KV_RANK, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE,
        "v_head_dim": VALUE, "q_lora_rank": q_rank, "attention_bias": bias, "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "moe_intermediate_size": INNER, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "routed_scaling_factor": SCALE,
    }  # fmt: skip
    return config, arguments | {"num_key_value_heads": config.num_heads}


# One of each family, and of each form that differs
LATENT_MODELS: dict[str, Callable[[], TinyModel]] = {
    "deepseek_v2": tiny_deepseek_v2,
    "deepseek_v2 with products for queries, groups and biases": lambda: tiny_deepseek_v2(20, 4, bias=True),
    "deepseek_v2 with yarn": lambda: tiny_deepseek_v2(yarn=True),
    "deepseek_v3": tiny_deepseek_v3,
    "deepseek_v3 with yarn, without groups": lambda: tiny_deepseek_v3(None, 1, yarn=True, interleaved=False),
}
