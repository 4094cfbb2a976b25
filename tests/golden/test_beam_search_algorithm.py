"""Beam search without an engine, against transformers: the choice of candidates and the state machine, driven by full
forward passes of a tiny model."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from ratoon.core.params import BeamSearchParams
from ratoon.core.request import FinishReason
from ratoon.scheduling.beams import BeamSearch, Hypothesis
from tests.golden.beam_oracle import (
    EARLY_STOPPING,
    PENALTIES,
    Text,
    assert_same_texts,
    likely_tokens,
    oracle_search,
    stop_tokens,
)
from tests.golden.engines import tiny_model
from tests.golden.tiny_models import TinyModel, random_token_ids
from tests.unit.layers.one_search import best_candidates

FAMILY = "llama with grouped heads"
WIDTHS = [1, 2, 3, 4, 5, 6, 7, 8, 16]
MAX_LENGTH = 12


def model() -> TinyModel:
    return tiny_model(FAMILY)


def forbid(logits: torch.Tensor, token_ids: list[int]) -> None:
    logits[:, token_ids] = -torch.inf


@torch.inference_mode()
def search(prompt: list[int], params: BeamSearchParams) -> list[Hypothesis]:
    assert params.max_tokens is not None
    beam_search = BeamSearch(params, params.max_tokens)
    beams = [prompt]
    while not beam_search.done:
        logits = model().oracle(torch.tensor(beams), use_cache=False).logits[:, -1].clone()
        held_back = params.all_stop_token_ids or [] if beam_search.num_tokens < params.min_tokens else []
        found = best_candidates(
            logits, torch.tensor(beam_search.scores), beam_search.num_candidates, partial(forbid, token_ids=held_back)
        )
        assert found is not None
        moves = beam_search.advance(*(column.tolist() for column in found))
        beams = [[*beams[parent], token] for parent, token in zip(moves.parents, moves.tokens)]
        for index, beam in enumerate(beams):
            assert beam_search.running_token_ids(index) == beam[len(prompt) :]
    return beam_search.hypotheses()


def assert_equal(prompt: list[int], params: BeamSearchParams) -> list[Hypothesis]:
    ours = search(prompt, params)
    theirs = oracle_search(model().oracle, prompt, params, params.all_stop_token_ids)
    assert_same_texts([Text(text.token_ids, text.score) for text in ours], theirs, params)
    return ours


@pytest.mark.parametrize("kind", ["likely", "several", "unlikely", "none"])
@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("length_penalty", PENALTIES)
@pytest.mark.one_in(11)
def test_texts_and_scores_are_those_of_transformers(length_penalty: float, early_stopping: Any, kind: str) -> None:
    chance = random.Random(f"{length_penalty} {early_stopping} {kind}")
    for width in chance.sample(WIDTHS, 3):
        prompt = random_token_ids(chance.randint(1, 6), seed=chance.randrange(8))
        max_tokens = chance.choice([MAX_LENGTH, chance.randint(1, MAX_LENGTH)])
        params = BeamSearchParams(
            beam_width=width,
            n=chance.choice([width, chance.randint(1, width)]),
            max_tokens=max_tokens,
            min_tokens=chance.choice([0, 0, chance.randint(0, max_tokens)]),
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            all_stop_token_ids=stop_tokens(kind, FAMILY, prompt, chance),
        )
        params.verify()
        assert_equal(prompt, params)


@pytest.mark.parametrize("width", WIDTHS)
def test_all_finished_texts_of_a_long_search(width: int) -> None:
    prompt = random_token_ids(5, seed=1)
    stop = likely_tokens(FAMILY, tuple(prompt))[:2]
    params = BeamSearchParams(
        beam_width=width, n=width, max_tokens=MAX_LENGTH, early_stopping="never", all_stop_token_ids=stop
    )
    for found in assert_equal(prompt, params):
        stopped = found.token_ids[-1] in stop
        assert found.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert found.score == pytest.approx(found.cumulative_logprob / len(found.token_ids))


def test_each_kind_of_early_stopping_ends_the_search_at_another_time() -> None:
    prompt = random_token_ids(5, seed=0)
    stop = likely_tokens(FAMILY, tuple(prompt))[:3]
    settings: dict[str, Any] = {"beam_width": 4, "n": 4, "max_tokens": MAX_LENGTH, "all_stop_token_ids": stop}
    at_once, soon, late = (
        assert_equal(prompt, BeamSearchParams(early_stopping=kind, **settings)) for kind in (True, False, "never")
    )
    assert at_once != soon
    assert soon != late
    assert late != at_once


@pytest.mark.parametrize("early_stopping", [False, True])
def test_one_beam_is_greedy_search(early_stopping: bool) -> None:
    prompt = random_token_ids(4, seed=2)
    greedy = model().oracle.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8, pad_token_id=0)
    expected = greedy[0, len(prompt) :].tolist()
    params = BeamSearchParams(
        beam_width=1, max_tokens=8, early_stopping=early_stopping, all_stop_token_ids=[expected[5]]
    )
    [found] = search(prompt, params)
    assert found.token_ids == expected[: expected.index(expected[5]) + 1]
    assert found.finish_reason == FinishReason.STOP
