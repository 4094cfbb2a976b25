"""Turns Hugging Face configs of state-space and hybrid models into ModelConfigs. Where a field may be absent, the
default is the one that transformers has for the same family."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ratoon.core.config import ExpertConfig, ModelConfig, PositionKind, StateSpaceConfig
from ratoon.models.config_fields import ConfigFields
from ratoon.models.damage import show
from ratoon.models.hf_decoder_config import decoder_config

MODEL_TYPES = {"mamba2": "Mamba2ForCausalLM", "granitemoehybrid": "GraniteMoeHybridForCausalLM"}
# A state has no greatest length. This is one for the tables of an engine, unless the config has max_position_embeddings
MAX_POSITION = 32768
STATES = ("mamba", "linear_attention")  # of layer_types, in older files and in newer ones
ATTENDS = ("attention", "full_attention")


def _parse_mamba2(fields: ConfigFields, architecture: str) -> ModelConfig:
    hidden_size = fields.count("hidden_size", 4096)
    inner = int(hidden_size * fields.number("expand", 2))
    head_dim = fields.count("head_dim", 64)
    num_heads = fields.count("num_heads", 128)
    if num_heads * head_dim != inner:
        problem = f"is {num_heads}, and heads have {head_dim} numbers"
        raise fields.wrong("num_heads", problem, f"heads that have {inner} numbers in all: hidden_size times expand")
    states = _states(
        fields, num_heads, head_dim, ("state_size", 128), ("n_groups", 8), ("conv_kernel", 4),
        ("use_conv_bias", "use_bias"),
    )  # fmt: skip
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size", 32768),
        hidden_size=hidden_size,
        intermediate_size=inner,
        num_layers=fields.layers("num_hidden_layers", 64),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position=fields.count("max_position_embeddings", MAX_POSITION),
        position_kind=PositionKind.IMPLICIT,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation="silu",
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        state_space=states,
        checkpoint_dtype=fields.dtype(),
        bos_token_id=fields.token_id("bos_token_id") if "bos_token_id" in fields.raw else 0,
        eos_token_ids=fields.token_ids("eos_token_id") if fields.raw.get("eos_token_id") is not None else (2,),
    )


def _parse_granite_hybrid(fields: ConfigFields, architecture: str) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    num_experts = 0 if fields.raw.get("num_local_experts", 8) == 0 else fields.count("num_local_experts", 8)
    experts = None
    if num_experts:
        top_k = fields.count("num_experts_per_tok", 2)
        if top_k > num_experts:
            raise fields.wrong("num_experts_per_tok", f"is {top_k}", f"at most {num_experts}, as many as there are")
        experts = ExpertConfig(num_experts, top_k, fields.count("intermediate_size", 11008), renormalise=True)
    config = decoder_config(
        fields, architecture, max_position=2048, bos=1, eos=(2,), attention_bias=has_bias,
        attention_output_bias=has_bias, experts=experts,
        intermediate_size=fields.count("shared_intermediate_size", 1024),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_multiplier=1.0 / fields.number("logits_scaling", 1.0),
    )  # fmt: skip
    inner = fields.count("mamba_expand", 2) * config.hidden_size
    num_heads = fields.count("mamba_n_heads", 128)
    head_dim = fields.divisible("mamba_expand · hidden_size", inner, "mamba_n_heads", num_heads)
    if fields.raw.get("mamba_d_head", "auto") not in ("auto", None, head_dim):
        shown = show(fields.raw["mamba_d_head"])
        raise fields.wrong("mamba_d_head", f"is {shown}", f"{head_dim}: mamba_n_heads have {inner} numbers in all")
    states = _states(
        fields, num_heads, head_dim, ("mamba_d_state", 256), ("mamba_n_groups", 1), ("mamba_d_conv", 4),
        ("mamba_conv_bias", "mamba_proj_bias"),
    )  # fmt: skip
    config = replace(config, state_space=replace(states, layers=_state_layers(fields, config.num_layers)))
    kind = fields.raw.get("position_embedding_type")
    if kind not in (None, "rope", "nope"):
        raise fields.wrong("position_embedding_type", f"is {show(kind)}", "rope or nope")
    if kind == "rope":
        return config
    return replace(config, position_kind=PositionKind.IMPLICIT, rotary_layers=(False,) * config.num_layers)


def _states(
    fields: ConfigFields,
    num_heads: int,
    head_dim: int,
    state_size: tuple[str, int],
    num_groups: tuple[str, int],
    conv_width: tuple[str, int],
    biases: tuple[str, str],
) -> StateSpaceConfig:
    """What both families have, under names of their own."""
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise fields.wrong("hidden_act", f"is {show(activation)}", "silu: layers with states have no other")
    groups = fields.count(*num_groups)
    fields.divisible("heads with states", num_heads, num_groups[0], groups)
    return StateSpaceConfig(
        num_heads, head_dim, fields.count(*state_size), groups, fields.count(*conv_width),
        conv_bias=fields.flag(biases[0], True), proj_bias=fields.flag(biases[1], False),
        time_step_limit=_time_step_limit(fields),
    )  # fmt: skip


def _state_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...] | None:
    kinds = fields.raw.get("layer_types", fields.raw.get("layers_block_type"))
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in STATES + ATTENDS for kind in kinds):
        known = ", ".join(STATES + ATTENDS)
        raise fields.wrong("layer_types", f"is {show(kinds)}", f"a list of {num_layers} kinds of layers: {known}")
    layers = tuple(kind in STATES for kind in kinds)
    if not any(layers):
        raise fields.wrong("layer_types", "has no layer with a state", f"at least one of {STATES[0]}")
    return None if all(layers) else layers


def _time_step_limit(fields: ConfigFields) -> tuple[float, float]:
    """Two numbers, of which the second may be infinite: JSON has no name for that, and files have several."""
    found = fields.raw.get("time_step_limit")
    if found is None:
        return 0.0, math.inf
    limits = [_number(item) for item in found] if isinstance(found, (list, tuple)) else []
    if len(limits) != 2 or any(item is None for item in limits) or not 0 <= limits[0] < limits[1]:  # type: ignore[operator]
        raise fields.wrong("time_step_limit", f"is {show(found)}", "two numbers, the lower one first")
    return limits[0], limits[1]  # type: ignore[return-value]


def _number(item: object) -> float | None:
    if isinstance(item, dict):
        item = item.get("__float__")
    if item in ("Infinity", "inf"):
        return math.inf
    is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
    return float(item) if is_number else None  # type: ignore[arg-type]


PARSERS: dict[str, Callable[[ConfigFields, str], ModelConfig]] = {
    "Mamba2ForCausalLM": _parse_mamba2,
    "GraniteMoeHybridForCausalLM": _parse_granite_hybrid,
}
