"""Reads what decoders' configs have in common: the rotation of heads, and which layers have a window."""

from __future__ import annotations

from collections.abc import Mapping

from ratoon.core.config import RopeScaling
from ratoon.models.config_fields import ConfigFields
from ratoon.models.damage import show

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def sliding_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Which layers have the window, by `layer_types`."""
    kinds = fields.raw.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.wrong("layer_types", f"is {show(kinds)}", f"a list of {num_layers} layer types")
    if unknown := [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]:
        raise fields.wrong("layer_types", f"holds {show(unknown)}", "sliding_attention or full_attention")
    return tuple(kind == "sliding_attention" for kind in kinds)


def rope_fields(fields: ConfigFields) -> ConfigFields:
    """`rope_scaling` is the older name of `rope_parameters`; where both are there, transformers takes the older."""
    rope = fields.below("rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters")
    if any(isinstance(value, Mapping) for value in rope.raw.values()):
        raise fields.wrong(rope.prefix.rstrip("."), "differs between kinds of layers", "one set of values for all")
    return rope


def rope_theta(fields: ConfigFields, rope: ConfigFields) -> float:
    return rope.number("rope_theta", fields.number("rope_theta", 10000.0))


def rotary_dim(fields: ConfigFields, rope: ConfigFields) -> int | None:
    """These families rotate whole heads. In transformers `partial_rotary_factor` then has no effect without rope
    scaling, and fails with it. For GGUF files, as in llama.cpp, the first `rotary_dim` values of a head are rotated."""
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share != 1.0 and rope_kind(rope) != "default":
        raise rope.wrong(
            "partial_rotary_factor", f"is {share:g} beside a rope scaling", "1: this family has whole heads"
        )
    return rope.optional_count("rotary_dim")


def rope_kind(rope: ConfigFields) -> str:
    return rope.text("rope_type", rope.text("type", "default"))


def rope_scaling(
    rope: ConfigFields, max_position: int, original_outside: int | None, num_frequencies: int
) -> RopeScaling:
    kind = rope_kind(rope)
    if kind not in ROPE_KINDS:
        raise rope.wrong("rope_type", f"is {show(kind)}", f"one of {', '.join(ROPE_KINDS)}")
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind=kind, factor=rope.number("factor"))
    if kind == "dynamic":  # transformers always starts stretching at the model's own length
        return RopeScaling(kind=kind, factor=rope.number("factor"), original_max_position=max_position)
    original = original_outside or rope.count("original_max_position_embeddings", max_position)
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=rope.number("factor"),
            original_max_position=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if kind == "longrope":
        return RopeScaling(
            kind=kind,
            factor=rope.number("factor", max_position / original),
            original_max_position=original,
            attention_factor=rope.optional_number("attention_factor"),
            short_factors=rope.numbers("short_factor", num_frequencies),
            long_factors=rope.numbers("long_factor", num_frequencies),
        )
    return RopeScaling(
        kind=kind,
        factor=rope.number("factor", max_position / original if "factor" in rope.raw else None),
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )
