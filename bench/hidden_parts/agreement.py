"""Engines are compared only where they give the same states."""

from __future__ import annotations

from peers.process import EngineFailedError

TOLERANCE = 1e-3  # of the largest number: sums in fp32 differ by the order in which they are made


def verify_same_states(name: str, ours: list[float], theirs: list[float]) -> None:
    largest = max(map(abs, ours))
    apart = max((abs(our - their) for our, their in zip(ours, theirs, strict=True)), default=0.0)
    if apart > TOLERANCE * largest:
        raise EngineFailedError(f"states by {name} are {apart:.2g} apart from ours, of numbers up to {largest:.2g}")
