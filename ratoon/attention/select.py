"""Choosing a backend: the first that has nothing against it, or the one that was asked for."""

from __future__ import annotations

from ratoon.attention.cpu import CpuAttentionBackend
from ratoon.attention.interface import AttentionBackend, AttentionNeeds
from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.core.errors import ConfigError

_BACKENDS: tuple[type[AttentionBackend], ...] = (CpuAttentionBackend, TorchReferenceBackend)  # fastest first


def select_backend(name: str, needs: AttentionNeeds) -> AttentionBackend:
    known = {backend.name: backend for backend in _BACKENDS}
    if name == "auto":
        chosen = next(backend for backend in _BACKENDS if not backend.reasons_against(needs))
        return chosen()
    if name not in known:
        raise ConfigError("attention_backend", f"{name!r} is unknown", f"auto, {', '.join(known)}")
    reasons = known[name].reasons_against(needs)
    if reasons:
        raise ConfigError("attention_backend", f"{name!r} can't serve this model: {'; '.join(reasons)}", "use auto")
    return known[name]()
