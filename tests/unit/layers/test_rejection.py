"""Rejection sampling of drafts: what is kept has the model's distribution, by a test of chi-square."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ratoon.layers.rejection import accept_or_draw, distribution
from ratoon.layers.sampling import Filters, uniform

NUM_DRAWS = 20_000
VOCABULARY = 12


def some_logits(seed: int, spread: float = 2.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, spread, VOCABULARY)).float()


def numbers(seed: int, count: int = NUM_DRAWS) -> torch.Tensor:
    return torch.from_numpy(uniform(np.full(count, seed, np.uint64), np.arange(count)))


def check_distribution(counts: np.ndarray, expected: np.ndarray) -> None:
    assert not counts[expected == 0].any(), "what is impossible was drawn"
    kept = expected > 0
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert statistic <= highest_statistic(int(kept.sum()) - 1)


def highest_statistic(freedom: int) -> float:
    """The value of chi-square that a right sampler exceeds once in 10,000 times, by Wilson and Hilferty."""
    spread = 2 / (9 * max(freedom, 1))
    return freedom * (1 - spread + 3.719 * spread**0.5) ** 3


def draw(
    logits: torch.Tensor, drafts: torch.Tensor, proposed: torch.Tensor | None, filters: Filters, temperature: float
):
    rows = logits.expand(len(drafts), -1)
    p = distribution(rows, torch.full((len(drafts),), temperature), filters)
    chosen = accept_or_draw(p, drafts, proposed, numbers(1, len(drafts)), numbers(2, len(drafts)))
    return p[0].double() / p[0].sum(dtype=torch.float64), chosen


def filters_of(count: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(
        torch.full((count,), top_k), torch.full((count,), top_p, dtype=torch.float64), torch.full((count,), min_p)
    )


@pytest.mark.parametrize("draft", [0, 3, VOCABULARY - 1, -1])
@pytest.mark.parametrize("given", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.1}], ids=str)
@pytest.mark.one_in(3)
def test_tokens_behind_a_draft_that_was_certain_have_the_distribution_of_the_model(draft, given):
    logits, drafts = some_logits(5), torch.full((NUM_DRAWS,), draft)
    p, chosen = draw(logits, drafts, None, filters_of(NUM_DRAWS, **given), 0.8)
    counts = np.bincount(chosen.token_ids.numpy(), minlength=VOCABULARY)
    check_distribution(counts, p.numpy() * NUM_DRAWS)
    assert not chosen.bad.any()
    if draft >= 0:  # it is accepted as often as it is probable
        assert counts[draft] / NUM_DRAWS == pytest.approx(float(p[draft]), abs=0.02)


def test_tokens_behind_a_draft_that_was_drawn_have_it_too_and_more_are_accepted():
    logits, other = some_logits(6), some_logits(6) + some_logits(7, 0.5)
    q = torch.softmax(other, -1).double()
    drafts = torch.searchsorted(q.cumsum(0), numbers(9)).clamp_max(VOCABULARY - 1)
    p, chosen = draw(logits, drafts, q.expand(NUM_DRAWS, -1), filters_of(NUM_DRAWS), 1.0)
    check_distribution(np.bincount(chosen.token_ids.numpy(), minlength=VOCABULARY), p.numpy() * NUM_DRAWS)
    share = float((chosen.token_ids == drafts).double().mean())
    assert share == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.02)
    assert share > float((p * q).sum()) + 0.1, "which is how often an independent draw would be the same"


def test_a_greedy_row_keeps_its_likeliest_token():
    logits = some_logits(8)
    best = int(logits.argmax())
    for draft in (best, (best + 1) % VOCABULARY, -1):
        _, chosen = draw(logits, torch.full((50,), draft), None, filters_of(50), 0.0)
        assert chosen.token_ids.tolist() == [best] * 50 and not chosen.bad.any()


def test_rows_that_can_not_be_used_have_no_token():
    for logits in (torch.full((VOCABULARY,), torch.nan), torch.full((VOCABULARY,), -torch.inf)):
        for temperature in (0.0, 1.0):
            _, chosen = draw(logits, torch.tensor([2, -1]), None, filters_of(2), temperature)
            assert chosen.bad.all()


def test_a_draft_that_is_certain_and_the_only_token_is_accepted():
    logits = torch.full((VOCABULARY,), -torch.inf)
    logits[4] = 1.0
    _, chosen = draw(logits, torch.tensor([4, 5]), None, filters_of(2), 1.0)
    assert chosen.token_ids.tolist() == [4, 4] and not chosen.bad.any()
