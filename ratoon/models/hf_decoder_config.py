"""Turns Hugging Face configs of decoder families into ModelConfigs: those whose fields or defaults are not Llama's.

Where a field may be absent, the default is the one that transformers has for the same family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ratoon.core.config import ModelConfig
from ratoon.models.config_fields import ConfigFields
from ratoon.models.damage import show
from ratoon.models.hf_rope import rope_fields, rope_kind, rope_scaling, sliding_layers

MODEL_TYPES = {
    "gemma2": "Gemma2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "falcon": "FalconForCausalLM",
}


def decoder_config(
    fields: ConfigFields,
    architecture: str,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    max_position: int | None = None,
    theta: float = 10000.0,
    share: float = 1.0,
    tied: bool = False,
    bos: int | None = None,
    eos: tuple[int, ...] = (),
    **values: Any,
) -> ModelConfig:
    """The fields that these families call alike, with a family's defaults: of KV heads (None: as many as heads), of a
    head's size (None: hidden size / heads), of the base of the rotation and the share of a head that is rotated, of
    tokens. `values` are fields of the result."""
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_kv_heads = values.pop("kv_heads", None) or fields.count("num_key_value_heads", num_kv_heads or num_heads)
    fields.divisible("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    head_dim = fields.optional_count("head_dim") or head_dim
    head_dim = head_dim or fields.divisible("hidden_size", hidden_size, "num_attention_heads", num_heads)
    max_position = fields.count("max_position_embeddings", max_position)
    rope = values.pop("rope", None) or rope_fields(fields)
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", share))
    rotary_dim = rope.optional_count("rotary_dim") or int(head_dim * share)
    original = fields.optional_count("original_max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=values.pop("intermediate_size", None) or fields.count("intermediate_size"),
        num_layers=fields.layers("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=values.pop("norm_eps", None) or fields.number("rms_norm_eps", 1e-6),
        activation=values.pop("activation", None) or fields.text("hidden_act", "silu"),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", theta)),
        rope_scaling=rope_scaling(rope, max_position, original, rotary_dim // 2),
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        tie_word_embeddings=fields.flag("tie_word_embeddings", tied),
        checkpoint_dtype=fields.dtype(),
        bos_token_id=fields.token_id("bos_token_id") if "bos_token_id" in fields.raw else bos,
        eos_token_ids=fields.token_ids("eos_token_id") if fields.raw.get("eos_token_id") is not None else eos,
        **values,
    )


def with_windows(config: ModelConfig, window: int | None, sliding: tuple[bool, ...]) -> ModelConfig:
    if window is None or not any(sliding):
        return config
    return replace(config, sliding_window=window, sliding_layers=None if all(sliding) else sliding)


def _parse_gemma2(fields: ConfigFields, architecture: str) -> ModelConfig:
    if fields.flag("use_bidirectional_attention", False):
        raise fields.wrong("use_bidirectional_attention", "is True", "False: the other form is not supported")
    has_bias = fields.flag("attention_bias", False)
    config = decoder_config(
        fields, architecture, num_kv_heads=4, head_dim=256, max_position=8192, tied=True, bos=2, eos=(1,),
        activation=fields.text("hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_bias=has_bias, attention_output_bias=has_bias, scale_embedding=True,
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", 50.0),
        final_soft_cap=_soft_cap(fields, "final_logit_softcapping", 30.0),
    )  # fmt: skip
    window = fields.optional_count("sliding_window") if "sliding_window" in fields.raw else 4096
    sliding = tuple(layer % 2 == 0 for layer in range(config.num_layers))
    if fields.raw.get("layer_types") is not None:
        sliding = sliding_layers(fields, config.num_layers)
    return with_windows(config, window, sliding)


def _soft_cap(fields: ConfigFields, name: str, default: float) -> float | None:
    """null: there is none."""
    return fields.optional_number(name) if name in fields.raw else default


def _parse_phi3(fields: ConfigFields, architecture: str) -> ModelConfig:
    """Older files call longrope "su" or "yarn"."""
    rope = rope_fields(fields)
    if rope_kind(rope) in ("su", "yarn"):
        rope = ConfigFields({**rope.raw, "rope_type": "longrope"}, fields.source, rope.prefix)
    if (kind := rope_kind(rope)) not in ("default", "longrope"):
        raise rope.wrong("rope_type", f"is {show(kind)}", "default or longrope")
    window = fields.optional_count("sliding_window")
    return decoder_config(
        fields, architecture, max_position=4096, bos=1, eos=(32000,), rope=rope, sliding_window=window,
        norm_eps=fields.number("rms_norm_eps", 1e-5),
    )  # fmt: skip


def _parse_olmo2(fields: ConfigFields, architecture: str) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    return decoder_config(
        fields, architecture, max_position=2048, eos=(50279,), norm_eps=fields.number("rms_norm_eps", 1e-5),
        attention_bias=has_bias, attention_output_bias=has_bias,
    )  # fmt: skip


def _parse_granite(fields: ConfigFields, architecture: str) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    return decoder_config(
        fields, architecture, max_position=2048, bos=1, eos=(2,), attention_bias=has_bias,
        attention_output_bias=has_bias, mlp_bias=fields.flag("mlp_bias", False),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_multiplier=1.0 / fields.number("logits_scaling", 1.0),
    )  # fmt: skip


def _parse_starcoder2(fields: ConfigFields, architecture: str) -> ModelConfig:
    has_bias = fields.flag("use_bias", True)
    return decoder_config(
        fields, architecture, num_kv_heads=2, max_position=4096, tied=True, bos=50256, eos=(50256,),
        norm_eps=fields.number("norm_epsilon", 1e-5), activation=fields.text("hidden_act", "gelu_pytorch_tanh"),
        attention_bias=has_bias, attention_output_bias=has_bias, mlp_bias=has_bias,
        sliding_window=fields.optional_count("sliding_window"),
    )  # fmt: skip


def _parse_smollm3(fields: ConfigFields, architecture: str) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    config = decoder_config(
        fields, architecture, num_kv_heads=4, max_position=32768, theta=2_000_000.0, tied=True, bos=128000,
        eos=(128001,), attention_bias=has_bias, attention_output_bias=has_bias, mlp_bias=fields.flag("mlp_bias", False),
    )  # fmt: skip
    interval = fields.count("no_rope_layer_interval", 4)
    rotary = tuple((layer + 1) % interval != 0 for layer in range(config.num_layers))
    if (marks := fields.raw.get("no_rope_layers")) is not None:
        if not isinstance(marks, list) or len(marks) != config.num_layers or any(mark not in (0, 1) for mark in marks):
            expected = f"a list of {config.num_layers} marks, 1 for a layer that rotates heads, else 0"
            raise fields.wrong("no_rope_layers", f"is {show(marks)}", expected)
        rotary = tuple(mark == 1 for mark in marks)
    config = replace(config, rotary_layers=None if all(rotary) else rotary)
    window = fields.optional_count("sliding_window") if fields.flag("use_sliding_window", False) else None
    sliding = tuple(not mark for mark in rotary)
    if fields.raw.get("layer_types") is not None:
        sliding = sliding_layers(fields, config.num_layers)
    return with_windows(config, window, sliding)


def _parse_glm(fields: ConfigFields, architecture: str) -> ModelConfig:
    return decoder_config(
        fields, architecture, num_kv_heads=2, head_dim=128, max_position=131072, share=0.5,
        eos=(151329, 151336, 151338), norm_eps=fields.number("rms_norm_eps", 1.5625e-7),
        attention_bias=fields.flag("attention_bias", True), interleaved_rotary=True,
    )  # fmt: skip


def _parse_gpt_neox(fields: ConfigFields, architecture: str) -> ModelConfig:
    has_bias = fields.flag("attention_bias", True)
    return decoder_config(
        fields, architecture, max_position=2048, theta=fields.number("rotary_emb_base", 10000.0),
        share=fields.number("rotary_pct", 0.25), bos=0, eos=(2,), kv_heads=fields.count("num_attention_heads"),
        norm_eps=fields.number("layer_norm_eps", 1e-5), activation=fields.text("hidden_act", "gelu"),
        attention_bias=has_bias, attention_output_bias=has_bias, mlp_bias=True,
        parallel_residual=fields.flag("use_parallel_residual", True),
    )  # fmt: skip


def _parse_falcon(fields: ConfigFields, architecture: str) -> ModelConfig:
    if fields.flag("alibi", False):
        raise fields.wrong("alibi", "is True", "False: positions by ALiBi are not supported")
    is_new, num_heads = fields.flag("new_decoder_architecture", False), fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_kv_heads", num_heads)
    if not is_new:
        num_kv_heads = 1 if fields.flag("multi_query", True) else num_heads
    has_bias = fields.flag("bias", False)
    return decoder_config(
        fields, architecture, max_position=2048, tied=True, bos=11, eos=(11,), kv_heads=num_kv_heads,
        intermediate_size=fields.count("ffn_hidden_size", 4 * fields.count("hidden_size")),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5), activation=fields.text("activation", "gelu"),
        attention_bias=has_bias, attention_output_bias=has_bias, mlp_bias=has_bias,
        parallel_residual=is_new or fields.flag("parallel_attn", True),
    )  # fmt: skip


PARSERS: dict[str, Callable[[ConfigFields, str], ModelConfig]] = {
    "Gemma2ForCausalLM": _parse_gemma2,
    "Phi3ForCausalLM": _parse_phi3,
    "Olmo2ForCausalLM": _parse_olmo2,
    "GraniteForCausalLM": _parse_granite,
    "Starcoder2ForCausalLM": _parse_starcoder2,
    "SmolLM3ForCausalLM": _parse_smollm3,
    "GlmForCausalLM": _parse_glm,
    "Glm4ForCausalLM": _parse_glm,
    "GPTNeoXForCausalLM": _parse_gpt_neox,
    "FalconForCausalLM": _parse_falcon,
}
