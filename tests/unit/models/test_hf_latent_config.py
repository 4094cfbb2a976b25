"""Configs of models with latent attention: real ones, and fields that are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from ratoon.core.config import ExpertConfig, LatentConfig
from ratoon.core.errors import ModelError
from ratoon.models.hf_config import parse_hf_config

YARN = {
    "type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
# Of the files of DeepSeek-V2-Lite and of DeepSeek-V3, without what no model of this form differs in
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "moe_layer_freq": 1, "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax",
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": YARN, "rms_norm_eps": 1e-6,
    "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 100000,
    "eos_token_id": 100001,
}  # fmt: skip
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "moe_layer_freq": 1, "first_k_dense_replace": 3, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "max_position_embeddings": 163840, "rope_theta": 10000, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "num_nextn_predict_layers": 1,
}  # fmt: skip


def test_deepseek_v2_lite_is_read() -> None:
    config = parse_hf_config(V2_LITE, "config")
    assert config.latent == LatentConfig(512, 64, 128, 128, None)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rotary_dim) == (16, 1, 576, 64)
    layers = (False, *[True] * 26)
    assert config.experts == ExpertConfig(64, 6, 1408, layers, shared_size=2816)
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.2608037**2)
    assert config.interleaved_rotary and config.rope_scaling.kind == "yarn"


def test_deepseek_v3_is_read() -> None:
    config = parse_hf_config(V3, "config")
    assert config.latent == LatentConfig(512, 64, 128, 128, 1536)
    layers = tuple(layer >= 3 for layer in range(61))
    assert config.experts == ExpertConfig(
        256, 8, 2048, layers, "sigmoid", True, 2.5, num_groups=8, top_groups=4, shared_size=2048
    )


def test_what_files_may_leave_out() -> None:
    dense = parse_hf_config({**V2_LITE, "n_routed_experts": None}, "config")
    assert dense.experts is None
    without = parse_hf_config({**V3, "n_shared_experts": None}, "config")
    assert without.experts is not None and without.experts.shared_size == 0
    halves = parse_hf_config({**V3, "rope_interleave": False, "rope_scaling": None}, "config")
    assert not halves.interleaved_rotary and halves.attention_scale == 192**-0.5


@pytest.mark.parametrize(
    ("base", "field", "value", "problem"),
    [
        (V2_LITE, "topk_method", "noaux_tc", "topk_method is 'noaux_tc'.*greedy or group_limited_greedy"),
        (V2_LITE, "scoring_func", "sigmoid", "scoring_func is 'sigmoid'.*softmax"),
        (V2_LITE, "norm_topk_prob", True, "norm_topk_prob is True.*false"),
        (V2_LITE, "mlp_bias", True, "mlp_bias is True.*false"),
        (V2_LITE, "kv_lora_rank", 0, "kv_lora_rank is 0.*above 0"),
        (V2_LITE, "q_lora_rank", "many", "q_lora_rank is 'many'"),
        (V2_LITE, "qk_rope_head_dim", 63, "qk_rope_head_dim is 63.*even"),
        (V2_LITE, "num_experts_per_tok", 65, "num_experts_per_tok is 65.*at most 64"),
        (V3, "topk_method", "greedy", "topk_method is 'greedy'.*noaux_tc"),
        (V3, "n_group", 7, "n_routed_experts is 256.*multiple of n_group"),
        (V3, "topk_group", 9, "topk_group is 9.*at most n_group"),
        (V3, "num_experts_per_tok", 200, "num_experts_per_tok is 200.*at most 128"),
        (V3, "rope_scaling", {"type": "spiral"}, "rope_type is 'spiral'"),
    ],
)
def test_a_wrong_field_is_named(base: dict[str, Any], field: str, value: object, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        parse_hf_config({**base, field: value}, "config")
