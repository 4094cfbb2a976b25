"""What messages cost, measured with few of them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


def test_plans_and_outputs_are_those_of_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "bench")
    costs = importlib.import_module("message_costs")
    first, plans, outputs = costs.decode_steps(4)
    assert first / 4 > costs.PROMPT_TOKENS, "a new request travels in full"
    assert len(plans) == len(outputs) == costs.STEPS
    assert max(plans) < first / 4, "a known one does not"
    assert costs.handling_rate(4, outputs[:8], 0.01) > 0
