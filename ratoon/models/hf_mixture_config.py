"""Turns Hugging Face configs of mixtures of experts into ModelConfigs. Where a field may be absent, the default is the
one that transformers has for the same family."""

from __future__ import annotations

from collections.abc import Callable

from ratoon.core.config import ExpertConfig, ModelConfig
from ratoon.models.config_fields import ConfigFields
from ratoon.models.damage import show
from ratoon.models.hf_decoder_config import decoder_config, with_windows
from ratoon.models.hf_rope import sliding_layers

GPT_OSS_ALPHA = 1.702  # of the gate's activation
MODEL_TYPES = {
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


def _parse_mixtral(fields: ConfigFields, architecture: str) -> ModelConfig:
    experts = ExpertConfig(
        _num_experts(fields, 8), _top_k(fields, 2), fields.count("intermediate_size", 14336), renormalise=True
    )
    window = fields.optional_count("sliding_window")
    return decoder_config(
        fields, architecture, num_kv_heads=8, max_position=131072, theta=1_000_000.0, bos=1, eos=(2,),
        norm_eps=fields.number("rms_norm_eps", 1e-5), sliding_window=window, experts=experts,
    )  # fmt: skip


def _parse_qwen2_moe(fields: ConfigFields, architecture: str) -> ModelConfig:
    config = decoder_config(
        fields, architecture, num_kv_heads=16, max_position=32768, attention_bias=fields.flag("qkv_bias", True),
        experts=_qwen_experts(fields, 60, 4, 1408, fields.count("shared_expert_intermediate_size", 5632)),
    )  # fmt: skip
    if not fields.flag("use_sliding_window", False):
        return config
    window = fields.optional_count("sliding_window") if "sliding_window" in fields.raw else 4096
    first = count_or_0(fields, "max_window_layers", 28)
    sliding = tuple(layer >= first for layer in range(config.num_layers))
    if fields.raw.get("layer_types") is not None:
        sliding = sliding_layers(fields, config.num_layers)
    return with_windows(config, window, sliding)


def _parse_qwen3_moe(fields: ConfigFields, architecture: str) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    window = fields.optional_count("sliding_window") if fields.flag("use_sliding_window", False) else None
    return decoder_config(
        fields, architecture, num_kv_heads=4, max_position=32768, attention_bias=has_bias,
        attention_output_bias=has_bias, sliding_window=window, experts=_qwen_experts(fields, 128, 8, 768, 0),
    )  # fmt: skip


def _parse_olmoe(fields: ConfigFields, architecture: str) -> ModelConfig:
    if fields.raw.get("clip_qkv") is not None:
        raise fields.wrong("clip_qkv", f"is {show(fields.raw['clip_qkv'])}", "null: the other form is not supported")
    has_bias = fields.flag("attention_bias", False)
    experts = ExpertConfig(
        _num_experts(fields, 64), _top_k(fields, 8), fields.count("intermediate_size", 2048),
        renormalise=fields.flag("norm_topk_prob", False),
    )  # fmt: skip
    return decoder_config(
        fields, architecture, max_position=4096, eos=(50279,), norm_eps=fields.number("rms_norm_eps", 1e-5),
        attention_bias=has_bias, attention_output_bias=has_bias, experts=experts,
    )  # fmt: skip


def _parse_glm4_moe(fields: ConfigFields, architecture: str) -> ModelConfig:
    num_layers, first = fields.layers("num_hidden_layers"), count_or_0(fields, "first_k_dense_replace", 1)
    inner = fields.count("moe_intermediate_size", 1408)
    experts = ExpertConfig(
        _num_experts(fields, 128), _top_k(fields, 8), inner,
        layers=tuple(layer >= first for layer in range(num_layers)), scoring="sigmoid",
        renormalise=fields.flag("norm_topk_prob", True), scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=fields.count("n_group", 1), top_groups=fields.count("topk_group", 1),
        shared_size=inner * fields.count("n_shared_experts", 1),
    )  # fmt: skip
    return decoder_config(
        fields, architecture, num_kv_heads=8, max_position=131072, share=0.5,
        norm_eps=fields.number("rms_norm_eps", 1e-5), attention_bias=fields.flag("attention_bias", False),
        head_norms=fields.flag("use_qk_norm", False), experts=experts,
    )  # fmt: skip


def _parse_gpt_oss(fields: ConfigFields, architecture: str) -> ModelConfig:
    """Every other layer has a window, unless the file says which."""
    if (alpha := fields.number("swiglu_alpha", GPT_OSS_ALPHA)) != GPT_OSS_ALPHA:
        raise fields.wrong("swiglu_alpha", f"is {alpha}", f"{GPT_OSS_ALPHA}: no other is supported")
    experts = ExpertConfig(
        _num_experts(fields, 128), _top_k(fields, 4), fields.count("intermediate_size", 2880), renormalise=True,
        gate_limit=fields.number("swiglu_limit", 7.0),
    )  # fmt: skip
    has_bias = fields.flag("attention_bias", True)
    config = decoder_config(
        fields, architecture, num_kv_heads=8, head_dim=64, max_position=131072, theta=150_000.0,
        norm_eps=fields.number("rms_norm_eps", 1e-5), attention_bias=has_bias, attention_output_bias=has_bias,
        mlp_bias=True, attention_sinks=True, experts=experts,
    )  # fmt: skip
    window = fields.optional_count("sliding_window") if "sliding_window" in fields.raw else 128
    sliding = tuple(layer % 2 == 0 for layer in range(config.num_layers))
    if fields.raw.get("layer_types") is not None:
        sliding = sliding_layers(fields, config.num_layers)
    return with_windows(config, window, sliding)


def _qwen_experts(fields: ConfigFields, count: int, top_k: int, inner: int, shared: int) -> ExpertConfig:
    """Layers are dense if they are named, or if their number is no multiple of a step."""
    num_layers, step = fields.layers("num_hidden_layers"), fields.count("decoder_sparse_step", 1)
    dense = fields.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and layer >= 0 for layer in dense):
        raise fields.wrong("mlp_only_layers", f"is {show(dense)}", "a list of numbers of layers")
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
    return ExpertConfig(
        _num_experts(fields, count), _top_k(fields, top_k), fields.count("moe_intermediate_size", inner),
        layers=None if all(layers) else layers, renormalise=fields.flag("norm_topk_prob", False), shared_size=shared,
    )  # fmt: skip


def _num_experts(fields: ConfigFields, default: int) -> int:
    """Files and versions of transformers call it by different names."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    name = next((name for name in names if name in fields.raw), names[0])
    return fields.count(name, default)


def _top_k(fields: ConfigFields, default: int) -> int:
    return top_k_of(fields, default, _num_experts(fields, default))


def top_k_of(fields: ConfigFields, default: int | None, most: int) -> int:
    """How many of so many experts a row goes to."""
    count = fields.count("num_experts_per_tok", default)
    if count > most:
        raise fields.wrong("num_experts_per_tok", f"is {count}", f"at most {most}, as many as there are experts")
    return count


def count_or_0(fields: ConfigFields, name: str, default: int) -> int:
    return 0 if fields.raw.get(name, default) == 0 else fields.count(name, default)


PARSERS: dict[str, Callable[[ConfigFields, str], ModelConfig]] = {
    "MixtralForCausalLM": _parse_mixtral,
    "Qwen2MoeForCausalLM": _parse_qwen2_moe,
    "Qwen3MoeForCausalLM": _parse_qwen3_moe,
    "OlmoeForCausalLM": _parse_olmoe,
    "Glm4MoeForCausalLM": _parse_glm4_moe,
    "GptOssForCausalLM": _parse_gpt_oss,
}
