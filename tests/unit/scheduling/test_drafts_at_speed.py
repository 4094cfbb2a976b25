"""Drafts of many requests on a GPU, in virtual time: none is made that costs more than it brings."""

from __future__ import annotations

import pytest

from bench.draft_parts.simulation import DEVICES, Engine

NUM_REQUESTS, NUM_TOKENS, NUM_ROUNDS = 32, 128, 4


@pytest.mark.parametrize(
    ("shape", "acceptance", "least"),
    [
        ("8b", 0.0, 0.98),
        ("8b", 0.6, 1.05),  # a step brings twice the tokens, and takes nearly twice as long
        ("8b", 0.9, 2.5),
        ("8b", 1.0, 3.4),
        ("0.6b", 0.0, 0.98),
        ("0.6b", 0.6, 0.95),
        ("0.6b", 0.9, 1.9),
        ("0.6b", 1.0, 2.6),
    ],
)
def test_drafts_of_many_requests_are_made_where_they_are_worth_it(shape: str, acceptance: float, least: float) -> None:
    engine = Engine(DEVICES[shape])
    without, drafting = engine.policy(drafts=False), engine.policy()
    ratios = []
    for _ in range(NUM_ROUNDS):
        before = engine.round(without, NUM_REQUESTS, NUM_TOKENS, acceptance)
        ratios.append(before / engine.round(drafting, NUM_REQUESTS, NUM_TOKENS, acceptance))
    assert sorted(ratios)[-2] >= least, ratios  # in the others graphs were captured
