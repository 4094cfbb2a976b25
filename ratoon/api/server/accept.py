"""The Accept header: which of several forms of an answer a client likes best."""

from __future__ import annotations

from collections.abc import Sequence

from ratoon.api.server.exchange import Scope, header


def preferred_type(scope: Scope, offered: Sequence[str]) -> str:
    """One of `offered`. The first of them for a client that names none, or accepts everything."""
    wishes = (header(scope, b"accept") or b"").decode("latin-1").lower().split(",")
    best, best_weight = offered[0], 0.0
    for wish in wishes:
        name, *parameters = (part.strip() for part in wish.split(";"))
        weight = _weight(parameters)
        if name in offered and weight > best_weight:  # of equal ones the first
            best, best_weight = name, weight
    return best


def _weight(parameters: Sequence[str]) -> float:
    text = next((parameter[2:] for parameter in parameters if parameter.startswith("q=")), "1")
    try:
        return float(text)
    except ValueError:
        return 0.0
