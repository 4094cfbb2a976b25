"""Locally typical sampling keeps the tokens that transformers keeps, behind the same filters and temperature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import TypicalLogitsWarper

from ratoon.core.errors import RequestError
from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.execution.rules.base import NO_RULES, apply_rules
from ratoon.execution.rules.build import rules_of
from ratoon.execution.rules.penalties import Penalties
from ratoon.execution.rules.typical import Typical
from ratoon.execution.sampling.sampling_rows import Needs, SamplingRows

VOCAB_SIZE = 200


def random_logits(num_rows: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def kept_by_transformers(logits: torch.Tensor, params: SamplingParams) -> list[bool]:
    scores, nothing = logits[None].clone(), torch.zeros(1, 0, dtype=torch.long)
    steps = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    for step in [*steps, TypicalLogitsWarper(mass=params.typical_p)]:
        scores = step(nothing, scores)
    return torch.isfinite(scores[0]).tolist()


CASES = [
    {"typical_p": 0.9},
    {"typical_p": 0.2},
    {"typical_p": 0.99},
    {"typical_p": 1e-6},
    {"typical_p": 0.5, "temperature": 0.7},
    {"typical_p": 0.9, "top_k": 20},
    {"typical_p": 0.6, "top_p": 0.8, "temperature": 1.5},
    {"typical_p": 0.6, "min_p": 0.1},
]


def test_the_tokens_that_are_kept_are_those_of_transformers_in_one_batch():
    all_params = [SamplingParams(**case) for case in CASES for _ in range(4)]
    logits = random_logits(len(all_params), seed=3)
    edited = logits.clone()
    apply_rules(edited, [rules_of(params, [1, 2]) for params in all_params])
    for row, params in enumerate(all_params):
        kept = torch.isfinite(edited[row]).tolist()
        assert kept == kept_by_transformers(logits[row], params), params
        assert 0 < sum(kept) < VOCAB_SIZE
        assert torch.equal(edited[row][kept], logits[row][kept])  # what is kept is not changed


def test_rows_without_it_and_forbidden_tokens_stay_as_they_are():
    params = [
        SamplingParams(),
        SamplingParams(typical_p=0.5, allowed_token_ids=[3, 4, 5]),
        SamplingParams(typical_p=0.5),
    ]
    logits = random_logits(3, seed=4)
    edited = logits.clone()
    apply_rules(edited, [rules_of(one, [1]) for one in params])
    assert torch.equal(edited[0], logits[0])
    assert set(torch.isfinite(edited[1]).nonzero().flatten().tolist()) <= {3, 4, 5}
    alone = logits[2:].clone()
    apply_rules(alone, [rules_of(params[2], [1])])
    assert torch.equal(alone[0], edited[2])


def test_greedy_requests_and_searches_have_no_such_rule():
    assert rules_of(SamplingParams(typical_p=0.5, temperature=0.0), [1]) == NO_RULES
    assert rules_of(BeamSearchParams(beam_width=2), [1]) == NO_RULES


def test_a_row_with_the_rule_has_no_other_filters_and_keeps_its_penalties_as_rules():
    rows = SamplingRows(2)
    rows.add(0, SamplingParams(typical_p=0.5, top_k=7, top_p=0.5, min_p=0.1, repetition_penalty=1.5), 5, [1, 2], [])
    assert (rows.top_k[0], rows.top_p[0], rows.min_p[0]) == (0, 1.0, 0.0)
    assert not rows.needs[0] & Needs.FILTER
    assert [type(rule) for rule in rows.rules[0]] == [Penalties, Typical]
    rows.add(1, SamplingParams(top_k=7), 5, [1], [])
    assert rows.top_k[1] == 7 and rows.needs[1] & Needs.FILTER


@pytest.mark.parametrize("value", [0.0, -1.0, 1.5, math.nan])
def test_values_without_meaning_are_refused(value: float):
    with pytest.raises(RequestError, match=r"^typical_p: "):
        SamplingParams(typical_p=value).verify()


def test_what_is_kept_has_at_least_the_requested_mass():
    from ratoon.layers.sampling import Filters, typical

    logits = random_logits(2, seed=6)
    none = Filters(torch.zeros(2, dtype=torch.long), torch.ones(2, dtype=torch.float64), torch.zeros(2))
    kept = typical(logits, none, torch.tensor([0.3, 0.9], dtype=torch.float64))
    mass = torch.softmax(logits, -1).where(kept, torch.zeros(())).sum(-1)
    assert np.all(mass.numpy() >= [0.3, 0.9])
