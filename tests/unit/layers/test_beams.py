"""The choice of beam candidates against a plain sort of all log-probabilities."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
import torch

from ratoon.layers import beams
from ratoon.layers.beams import Candidates, SearchRows, best_candidates_of_searches
from tests.unit.layers.one_search import best_candidates

Tensor = torch.Tensor


def random_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def random_scores(num_rows: int, seed: int = 0) -> Tensor:
    return -torch.rand(num_rows, generator=torch.Generator().manual_seed(seed)) * 4


def plain_choice(logits: Tensor, scores: Tensor, num_candidates: int, held_back: Collection[int] = ()) -> Candidates:
    sums = torch.log_softmax(logits, dim=-1)
    sums[:, list(held_back)] = -torch.inf
    values, places = (sums + scores[:, None]).flatten().sort(descending=True, stable=True)
    places = places[:num_candidates]
    found = (values[:num_candidates], places // logits.shape[1], places % logits.shape[1])
    return Candidates(*(part.numpy() for part in found))


def forbidding(rows: slice, token_ids: list[int]) -> beams.Edit:
    def edit(logits: Tensor) -> None:
        logits[rows, token_ids] = -torch.inf

    return edit


def assert_same(found: Candidates | None, expected: Candidates) -> None:
    assert found is not None
    for ours, theirs in zip(found, expected):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("vocab_size", [1, 7, 255, 256, 257, 1030, 5003])
@pytest.mark.parametrize(("num_beams", "num_candidates"), [(1, 2), (1, 64), (3, 6), (16, 32), (16, 80), (40, 3)])
def test_the_candidates_are_the_first_of_all_sorted(vocab_size, num_beams, num_candidates):
    logits, scores = random_logits(num_beams, vocab_size), random_scores(num_beams)
    expected = plain_choice(logits, scores, num_candidates)
    assert len(expected.scores) == min(num_candidates, num_beams * vocab_size)
    assert_same(best_candidates(logits, scores, num_candidates), expected)


@pytest.mark.parametrize("num_candidates", [1, 5, 300, 2000])
def test_among_equals_the_lowest_beam_comes_first_then_the_lowest_token(num_candidates):
    coarse = random_logits(4, 1030, scale=1.0).round()  # a handful of values
    for logits in (coarse, torch.zeros(4, 1030), coarse.sort(dim=-1).values):
        scores = torch.tensor([-1.0, -1.0, 0.0, -1.0])
        expected = plain_choice(logits, scores, num_candidates)
        assert_same(best_candidates(logits, scores, num_candidates), expected)


def test_equals_far_apart_keep_their_order():
    logits = torch.zeros(2, 8 * beams.CHUNK)
    logits[:, 17 :: beams.CHUNK] = 1.0  # one in every chunk
    logits[1, 5 * beams.CHUNK + 18] = 2.0  # a better one late, beside an equal one
    scores = torch.tensor([0.0, 0.0])
    alone = best_candidates(logits[:1], scores[:1], 1).scores[0]
    scores[1] = float(alone - best_candidates(logits[1:], scores[1:], 2).scores[1])
    for num_candidates in (2, 5, 11, 15):
        expected = plain_choice(logits, scores, num_candidates)
        assert expected.beams.tolist()[:2] == [1, 0]
        assert_same(best_candidates(logits, scores, num_candidates), expected)


def test_equal_candidates_do_not_bring_all_logits_with_them(monkeypatch):
    looked_at = []
    pick = beams._pick
    monkeypatch.setattr(beams, "_pick", lambda *places: looked_at.append(places[-1].size) or pick(*places))
    best_candidates(torch.zeros(64, 2560), torch.zeros(64), 4)
    assert max(looked_at) <= 2 * 4 * beams.CHUNK


def test_tokens_held_back_are_impossible_and_the_others_keep_their_probabilities():
    logits, scores = random_logits(3, 600), random_scores(3)
    held_back = logits.amax(dim=0).topk(5).indices.tolist()
    expected = plain_choice(logits, scores, 12, held_back)
    found = best_candidates(logits, scores, 12, forbidding(slice(None), held_back))
    assert_same(found, expected)
    assert not set(held_back) & set(found.tokens.tolist())


def test_an_edit_finds_log_probabilities_where_it_asks_for_them():
    logits, scores = random_logits(5, 600), random_scores(5)
    expected = best_candidates(logits.clone(), scores, 12)
    seen = []
    searches = [SearchRows(0, 5, 12)]
    [found] = best_candidates_of_searches(
        logits.clone(), scores, searches, lambda edited: seen.append(edited.clone()), logprob_rows=[1, 4]
    )
    assert_same(found, expected)  # to the bit
    assert torch.equal(seen[0][[0, 2, 3]], logits[[0, 2, 3]])
    assert torch.equal(seen[0][[1, 4]], torch.log_softmax(logits, -1)[[1, 4]])
    [halved] = best_candidates_of_searches(
        logits.clone(), scores, searches, lambda edited: edited.mul_(0.5), logprob_rows=range(5)
    )
    values = (torch.log_softmax(logits, -1) * 0.5 + scores[:, None]).flatten().sort(descending=True).values
    assert np.array_equal(halved.scores, values[:12].numpy())


def test_impossible_tokens_come_last_when_there_are_no_others():
    found = best_candidates(torch.zeros(2, 3), torch.zeros(2), 6, forbidding(slice(None), [1]))
    assert found.tokens.tolist() == [0, 2, 0, 2, 1, 1]
    assert np.isinf(found.scores).tolist() == [False] * 4 + [True] * 2


def test_16_bit_logits_are_read_in_float32():
    logits, scores = random_logits(3, 600).bfloat16(), random_scores(3)
    assert_same(best_candidates(logits, scores, 12), plain_choice(logits.float(), scores, 12))


def test_several_searches_in_one_step_get_what_each_would_get_alone():
    logits, scores = random_logits(29, 700), random_scores(29)
    searches = [SearchRows(0, 1, 40), SearchRows(1, 17, 32), SearchRows(17, 20, 9), SearchRows(20, 29, 18)]
    alone = [
        best_candidates(
            logits[start:stop].clone(),
            scores[start:stop],
            count,
            forbidding(slice(None), [3, 5]) if start == 1 else None,
        )
        for start, stop, count in searches
    ]
    together = best_candidates_of_searches(logits, scores, searches, forbidding(slice(1, 17), [3, 5]))
    for found, expected in zip(together, alone, strict=True):
        assert expected is not None
        assert_same(found, expected)


def test_a_small_bound_on_copies_changes_no_bit(monkeypatch):
    logits, scores = random_logits(9, 700), random_scores(9)
    expected = best_candidates(logits, scores, 18)
    copied = []
    log_softmax = torch.log_softmax
    monkeypatch.setattr(torch, "log_softmax", lambda x, dim: copied.append(x.numel()) or log_softmax(x, dim))
    monkeypatch.setattr(beams, "MAX_COPIED", 1500)
    assert_same(best_candidates(logits, scores, 18), expected)
    assert max(copied) <= 1500


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_only_the_search_with_a_bad_row_gets_nothing(bad):
    logits, scores = random_logits(6, 300), random_scores(6)
    expected = best_candidates(logits[:2].clone(), scores[:2], 4)
    logits[3, 17] = bad
    good, spoilt, good_too = best_candidates_of_searches(
        logits, scores, [SearchRows(0, 2, 4), SearchRows(2, 4, 4), SearchRows(4, 6, 4)]
    )
    assert_same(good, expected)
    assert spoilt is None
    assert good_too is not None


def test_a_row_without_any_token_is_bad():
    assert best_candidates(torch.full((1, 8), -torch.inf), torch.zeros(1), 2) is None


def test_large_logits_lose_no_probability():
    logits = random_logits(2, 300) + 1e4
    expected = plain_choice(logits, torch.zeros(2), 5)
    assert_same(best_candidates(logits, torch.zeros(2), 5), expected)
