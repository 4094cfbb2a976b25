"""Chooses a backend for layers with equal needs: the first that supports them, or the one asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ratoon.attention.cpu import CpuAttentionBackend
from ratoon.attention.cpu_states import CpuStateBackend
from ratoon.attention.interface import AttentionBackend, AttentionNeeds
from ratoon.attention.state_space import TorchStateBackend
from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.attention.triton_backend import TritonAttentionBackend
from ratoon.attention.triton_states import TritonStateBackend
from ratoon.core.errors import ConfigError
from ratoon.core.kv import StateSpec
from ratoon.core.plugins import ATTENTION_BACKENDS, PluginError, find_plugin, plugin_names

# Fastest first
BACKENDS: list[type[AttentionBackend]] = [CpuAttentionBackend, TritonAttentionBackend, TorchReferenceBackend]
# Of layers with states in the place of attention
STATE_BACKENDS: list[type[AttentionBackend]] = [CpuStateBackend, TritonStateBackend, TorchStateBackend]


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend of some layers, and why the others were not chosen."""

    layers: str  # which layers these are, for logs
    backend: AttentionBackend
    reasons_against: dict[str, list[str]]  # by backend that was not chosen

    def facts(self) -> dict[str, Any]:
        return {"layers": self.layers, "backend": self.backend.name, "reasons_against": self.reasons_against}

    def __str__(self) -> str:
        against = "; ".join(f"not {name}: {', '.join(why)}" for name, why in self.reasons_against.items())
        return f"{self.layers}: {self.backend.name} ({against})"


def find_registered(name: str) -> list[type[AttentionBackend]]:
    """The backend that a package registers under this name (an entry point of the group `ratoon.attention_backends`),
    or none. Raises ConfigError if it is broken."""
    try:
        found = find_plugin(ATTENTION_BACKENDS, name, lambda found: _is_backend(found, name), f"backend named {name!r}")
    except PluginError as error:
        raise ConfigError("attention_backend", f"{name!r} {error.problem}", "another version of it") from error
    return [] if found is None else [found]


def _is_backend(found: object, name: str) -> bool:
    return isinstance(found, type) and issubclass(found, AttentionBackend) and found.name == name


def _reasons_against(backend: type[AttentionBackend], needs: AttentionNeeds) -> list[str]:
    reasons = list(backend.reasons_against(needs))
    if needs.sees_ahead and not backend.sees_ahead:
        reasons.append("the rows of an image can't see those behind them")
    if needs.has_soft_cap and not backend.caps_scores:
        reasons.append("scores can't have a soft cap")
    if needs.has_sinks and not backend.has_sinks:
        reasons.append("heads can't have sinks")
    return reasons


def select_backend(name: str, needs: AttentionNeeds, layers: str) -> BackendChoice:
    """`name` is the setting, which is about attention: that of states is always the first that supports them."""
    has_states = needs.content == StateSpec.content
    candidates = list(STATE_BACKENDS if has_states else BACKENDS)
    name = "auto" if has_states else name
    if name != "auto" and name not in {backend.name for backend in candidates}:
        candidates += find_registered(name)
    reasons = {backend.name: _reasons_against(backend, needs) for backend in candidates}
    if name != "auto" and name not in reasons:
        known = [*reasons, *plugin_names(ATTENTION_BACKENDS)]
        raise ConfigError("attention_backend", f"{name!r} is unknown", f"auto, {', '.join(known)}")
    fitting = [backend for backend in candidates if not reasons[backend.name] and name in ("auto", backend.name)]
    if not fitting:
        against = "; ".join(f"{other}: {', '.join(reasons[other])}" for other in reasons if name in ("auto", other))
        expected = "another model" if name == "auto" else "use auto"
        raise ConfigError("attention_backend", f"{name!r} can't serve {layers}: {against}", expected)
    chosen = fitting[0]
    not_asked = f"{chosen.name} is faster" if name == "auto" else f"{name} was asked for"
    others = {other: why or [not_asked] for other, why in reasons.items() if other != chosen.name}
    return BackendChoice(layers, chosen.create(needs), others)
