"""Beam searches over candidates written by hand, with results computed by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.core.params import BeamSearchParams
from ratoon.core.request import FinishReason
from ratoon.scheduling.beams import BeamMoves, BeamSearch

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = 9
OVER = BeamMoves([], [], [])


def beam_search(width: int, max_tokens: int = 10, stop: list[int] | None = None, **changes: Any) -> BeamSearch:
    params = BeamSearchParams(
        beam_width=width, n=width, max_tokens=max_tokens, all_stop_token_ids=[EOS] if stop is None else stop, **changes
    )
    return BeamSearch(params, max_tokens)


def advance(search: BeamSearch, *candidates: tuple[float, int, int]) -> BeamMoves:
    """Candidates as (score, beam, token), best first."""
    scores, beams, tokens = zip(*candidates) if candidates else ((), (), ())
    return search.advance(scores, beams, tokens)


def texts(search: BeamSearch) -> list[tuple[list[int], float, FinishReason]]:
    return [(found.token_ids, found.score, found.finish_reason) for found in search.hypotheses()]


def test_it_starts_with_one_beam_without_tokens():
    search = beam_search(3)
    assert (search.scores, search.done) == ([0.0], False)
    assert search.running_token_ids(0) == [] and search.best_so_far() is None
    assert search.hypotheses() == []


def test_it_asks_for_enough_candidates_that_the_width_goes_on_whatever_stops():
    assert beam_search(4, stop=[]).num_candidates == 4
    assert beam_search(4, stop=[9]).num_candidates == 8
    assert beam_search(4, stop=[7, 8, 9, 9]).num_candidates == 16


def test_the_best_candidates_become_the_beams_and_a_beam_can_have_several_children():
    search = beam_search(2)
    assert advance(search, (-1, 0, 4), (-2, 0, 5), (-3, 0, 6)) == BeamMoves([0, 0], [4, 5], [-1, -2])
    assert advance(search, (-2.5, 1, 7), (-2.6, 1, 8), (-3, 0, 1)) == BeamMoves([1, 1], [7, 8], [-2.5, -2.6])
    assert search.scores == [-2.5, -2.6]
    assert [search.running_token_ids(beam) for beam in (0, 1)] == [[5, 7], [5, 8]]


def test_a_stop_token_finishes_a_text_and_the_next_candidate_takes_the_place():
    search = beam_search(2)
    moves = advance(search, (-1, 0, EOS), (-2, 0, 5), (-3, 0, 6), (-4, 0, 7))
    assert moves == BeamMoves([0, 0], [5, 6], [-2, -3])
    assert texts(search) == [([EOS], -1, STOP)]
    assert not search.done


def test_a_stop_token_behind_the_first_candidates_finishes_nothing():
    search = beam_search(2)
    moves = advance(search, (-1, 0, 4), (-2, 0, 5), (-3, 0, EOS), (-4, 0, 7))
    assert moves.tokens == [4, 5]
    assert search.hypotheses() == []


def test_at_full_length_the_first_candidates_are_the_texts():
    search = beam_search(2, max_tokens=2)
    advance(search, (-1, 0, 4), (-2, 0, 5), (-3, 0, 6), (-4, 0, 7))
    assert advance(search, (-2, 0, 6), (-4, 1, EOS), (-5, 0, 7), (-6, 1, 7)) == OVER
    assert search.done
    assert texts(search) == [([4, 6], -1, LENGTH), ([5, EOS], -2, STOP)]


def test_one_token_is_enough_of_a_search():
    search = beam_search(2, max_tokens=1)
    assert advance(search, (-1, 0, 4), (-2, 0, 5), (-3, 0, 6)) == OVER
    assert texts(search) == [([4], -1, LENGTH), ([5], -2, LENGTH)]


@pytest.mark.parametrize(("length_penalty", "first"), [(-1.0, [EOS]), (0.0, [EOS]), (1.0, [4, EOS]), (2.0, [4, EOS])])
def test_the_length_penalty_divides_by_a_power_of_the_length(length_penalty, first):
    search = beam_search(2, length_penalty=length_penalty, early_stopping=True)
    advance(search, (-3, 0, EOS), (-3.5, 0, 4), (-5, 0, 5), (-6, 0, 6))
    advance(search, (-4, 0, EOS), (-7, 0, 5), (-8, 0, 6), (-9, 0, 7))
    assert search.done
    found = {tuple(text): score for text, score, _ in texts(search)}
    assert found == pytest.approx({(EOS,): -3, (4, EOS): -4 / 2**length_penalty})
    assert search.hypotheses()[0].token_ids == first
    assert {found.cumulative_logprob for found in search.hypotheses()} == {-3, -4}


def full_after_one_step(**changes: Any) -> BeamSearch:
    """Two texts are finished with -1 and -1.5; the best of the beams stands at -2."""
    search = beam_search(2, stop=[8, 9], max_tokens=4, **changes)
    advance(search, (-1, 0, 8), (-1.5, 0, 9), (-2, 0, 4), (-3, 0, 5), (-4, 0, 6), (-5, 0, 7))
    return search


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "done"),
    [
        (True, 1.0, True),
        (True, 2.0, True),
        (False, 1.0, True),  # -2 / 1 is no better than -1.5
        (False, 2.0, True),
        ("never", 1.0, False),  # -2 / 4 could be
        ("never", 0.5, False),
        ("never", 0.0, True),  # a sum never grows
        ("never", -1.0, True),
    ],
)
def test_when_it_is_over_with_as_many_texts_as_beams(early_stopping, length_penalty, done):
    search = full_after_one_step(early_stopping=early_stopping, length_penalty=length_penalty)
    assert search.done is done
    assert texts(search) == [([8], -1, STOP), ([9], -1.5, STOP)]
    assert bool(search.scores) is not done


def test_it_goes_on_while_the_best_beam_as_it_is_beats_the_worst_text():
    search = beam_search(2)
    advance(search, (-1, 0, 4), (-2, 0, EOS), (-3, 0, 5), (-4, 0, 6))
    advance(search, (-1.5, 0, 5), (-3, 0, EOS), (-4, 1, 5), (-6, 1, 6))  # texts: -1.5 and -2; the best beam: -0.75
    assert not search.done
    advance(search, (-6, 0, 6), (-7, 0, 7), (-8, 1, 6), (-9, 1, 7))  # the best beam: -2
    assert search.done
    assert texts(search) == [([4, EOS], -1.5, STOP), ([EOS], -2, STOP)]


@pytest.mark.parametrize("early_stopping", [False, "never"])
def test_with_a_penalty_below_0_there_is_no_better_length_than_the_present(early_stopping):
    search = beam_search(2, length_penalty=-1.0, early_stopping=early_stopping)
    advance(search, (-1, 0, 4), (-3, 0, EOS), (-4, 0, 5), (-5, 0, 6))
    advance(search, (-2, 0, 5), (-2.5, 0, EOS), (-4, 0, 6), (-5, 0, 7))  # texts: -3 and -5; the best beam: -4
    assert not search.done
    advance(search, (-2.1, 0, 6), (-4, 0, 7), (-5, 0, 8), (-6, 0, 5))  # the best beam: -6.3
    assert search.done


def test_a_better_text_replaces_the_worst_and_a_worse_one_nothing():
    search = full_after_one_step(early_stopping="never")
    advance(search, (-2.2, 0, 8), (-3.1, 1, 9), (-3.2, 0, 4), (-3.3, 0, 5), (-9, 0, 1), (-9, 0, 2))
    assert texts(search) == [([8], -1, STOP), ([4, 8], -1.1, STOP)]


def test_several_texts_that_finish_at_once_replace_worse_ones_before_them():
    search = beam_search(2, length_penalty=4.0, early_stopping="never", stop=[8, 9])
    advance(search, (-1, 0, 4), (-2, 0, 8), (-3, 0, 5), (-4, 0, 6), (-5, 0, 7), (-6, 0, 9))
    advance(search, (-2, 0, 8), (-2.4, 0, 9), (-3, 0, 4), (-4, 0, 5), (-5, 0, 6), (-6, 0, 7))
    assert [text for text, _, _ in texts(search)] == [[4, 8], [4, 9]]


def test_of_equal_texts_the_earlier_stays():
    search = full_after_one_step(early_stopping="never")
    advance(search, (-2, 0, 8), (-3, 1, 9), (-3.1, 0, 4), (-3.3, 0, 5), (-9, 0, 1), (-9, 0, 2))
    assert texts(search) == [([8], -1, STOP), ([4, 8], -1, STOP)]


def test_impossible_candidates_are_no_beams_and_no_texts():
    search = beam_search(4, max_tokens=2)
    moves = advance(search, (-1, 0, 4), (-2, 0, 5), (-math.inf, 0, EOS), (-math.inf, 0, 7))
    assert moves == BeamMoves([0, 0], [4, 5], [-1, -2])
    advance(search, (-2, 0, 4), (-3, 1, 5), (-math.inf, 0, EOS), (-math.inf, 1, 7))
    assert [text for text, _, _ in texts(search)] == [[4, 4], [5, 5]]


def test_a_vocabulary_smaller_than_the_width_gives_what_it_has():
    search = beam_search(4, max_tokens=2, stop=[])
    assert advance(search, (-1, 0, 0), (-2, 0, 1)).parents == [0, 0]
    advance(search, (-2, 0, 0), (-3, 0, 1), (-4, 1, 0), (-5, 1, 1))
    assert [text for text, _, _ in texts(search)] == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_it_is_over_when_nothing_can_follow():
    search = beam_search(2)
    assert advance(search, (-1, 0, EOS), (-math.inf, 0, 4)) == OVER
    assert (search.done, texts(search)) == (True, [([EOS], -1, STOP)])
    nothing = beam_search(2)
    assert advance(nothing) == OVER
    assert (nothing.done, nothing.hypotheses(), nothing.best_so_far()) == (True, [], None)


def test_only_the_texts_asked_for_are_returned():
    params = BeamSearchParams(beam_width=3, n=2, max_tokens=1)
    search = BeamSearch(params, 1)
    advance(search, (-1, 0, 4), (-2, 0, 5), (-3, 0, 6))
    assert [found.token_ids for found in search.hypotheses()] == [[4], [5]]


def test_the_best_so_far_is_a_beam_or_a_text_whichever_stands_better():
    search = beam_search(2)
    advance(search, (-1, 0, 4), (-1.2, 0, EOS), (-2, 0, 5), (-3, 0, 6))
    assert search.best_so_far().token_ids == [4]
    advance(search, (-3, 0, 5), (-4, 0, 6), (-5, 1, 5), (-6, 1, 6))  # -1.5 against -1.2
    assert search.best_so_far().token_ids == [EOS]
    advance(search, (-3.3, 0, 7), (-4.1, 1, 8), (-5, 1, 5), (-6, 1, 6))  # -1.1 against -1.2
    assert search.best_so_far().token_ids == [4, 5, 7]


def test_when_it_is_over_the_best_so_far_is_the_best_text():
    search = full_after_one_step(early_stopping=True)
    assert search.best_so_far().token_ids == search.hypotheses()[0].token_ids == [8]


def test_a_long_search_needs_no_deep_recursion():
    search = beam_search(1, max_tokens=200_000, stop=[])
    while not search.done:
        advance(search, (-1, 0, 4))
    assert len(search.hypotheses()[0].token_ids) == 200_000
    del search


@given(
    width=st.integers(1, 6),
    max_tokens=st.integers(1, 8),
    num_stop=st.integers(0, 3),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    seed=st.integers(0, 2**32),
)
def test_any_search_ends_in_time_with_distinct_texts_in_order(
    width, max_tokens, num_stop, length_penalty, early_stopping, seed
):
    chance = random.Random(seed)
    stop = list(range(num_stop))
    search = beam_search(width, max_tokens, stop=stop, length_penalty=length_penalty, early_stopping=early_stopping)
    sums: dict[tuple[int, ...], float] = {(): 0.0}  # of every text that was ever a candidate
    beams: list[tuple[int, ...]] = [()]
    for _ in range(max_tokens):
        continuations = [
            (score - chance.expovariate(1), beam, token)
            for beam, score in enumerate(search.scores)
            for token in range(12)
        ]
        candidates = sorted(continuations, key=lambda candidate: -candidate[0])[: search.num_candidates]
        sums |= {(*beams[beam], token): score for score, beam, token in candidates}
        moves = advance(search, *candidates)
        beams = [(*beams[parent], token) for parent, token in zip(moves.parents, moves.tokens)]
        assert moves.scores == sorted(moves.scores, reverse=True) == search.scores == [sums[beam] for beam in beams]
        assert not set(moves.tokens) & set(stop)
        if search.done:
            break
        assert len(beams) == width
    assert search.done
    found = search.hypotheses()
    assert len(found) == width
    assert len({tuple(text.token_ids) for text in found}) == len(found)
    assert [text.score for text in found] == sorted((text.score for text in found), reverse=True)
    for text in found:
        assert text.cumulative_logprob == sums[tuple(text.token_ids)]
        assert (text.finish_reason == STOP) == (text.token_ids[-1] in stop)
        assert text.finish_reason == STOP or len(text.token_ids) == max_tokens
