"""Settings that override fields of a model's config.json: `hf_overrides`, of which `rope_scaling` is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratoon.core.config import ModelConfig, PositionKind
from ratoon.core.errors import ConfigError

ROPE_FIELDS = ("rope_parameters", "rope_scaling")  # the newer and the older name


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config with these fields replaced. An override of the rotary embedding replaces its scaling and keeps its
    base, under either name."""
    changed = {**raw, **overrides}
    for name in ROPE_FIELDS:
        rope = overrides.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise ConfigError(name, f"{rope!r} is not an object", '{"rope_type": "yarn", "factor": 4.0}, for example')
        theta = next((known["rope_theta"] for known in _rope_objects(raw) if "rope_theta" in known), None)
        kept = {} if theta is None else {"rope_theta": theta}
        for other in ROPE_FIELDS:
            changed.pop(other, None)
        changed["rope_parameters"] = {**kept, **rope}
    return changed


def verify_overrides(config: ModelConfig, overrides: Mapping[str, Any]) -> None:
    """ConfigError for a rope scaling of a model that has no rotary embedding."""
    given = next((name for name in ROPE_FIELDS if overrides.get(name) is not None), None)
    if given is not None and config.position_kind != PositionKind.ROTARY:
        raise ConfigError(given, f"the model's positions are {config.position_kind.value}, not rotary", "leave it out")


def _rope_objects(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [rope for name in ROPE_FIELDS[::-1] if isinstance(rope := raw.get(name), Mapping)]
