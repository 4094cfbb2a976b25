"""Tokens that may not be generated, in the front end: what the model's files name is filled in, ids are checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ratoon.core.errors import RequestError
from ratoon.core.params import BeamSearchParams, SamplingParams, TimestampRules
from ratoon.engine.input.params_processor import ParamsProcessor
from tests.unit.engine.fakes import END, VOCAB_SIZE, model_config

KINDS: list[Any] = [SamplingParams, lambda **fields: BeamSearchParams(beam_width=4, **fields)]


def processor(**fields: Any) -> ParamsProcessor:
    return ParamsProcessor(replace(model_config(), **fields), None, {}, max_model_len=64)


def rules(first_token_id: int) -> TimestampRules:
    return TimestampRules(first_token_id=first_token_id, no_timestamps_token_id=6, end_token_id=5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_s_own_are_filled_in_where_the_caller_names_none(kind):
    of_model = processor(suppressed_token_ids=(3, 4), suppressed_first_token_ids=(5,))
    params = of_model.complete(kind(), 8)
    assert (params.suppressed_token_ids, params.suppressed_first_token_ids) == ([3, 4], [5])
    params = of_model.complete(kind(suppressed_token_ids=[], suppressed_first_token_ids=[9]), 8)
    assert (params.suppressed_token_ids, params.suppressed_first_token_ids) == ([], [9])
    params = processor().complete(kind(), 8)
    assert params.suppressed_token_ids is params.suppressed_first_token_ids is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("suppressed_token_ids", {"suppressed_token_ids": [0, VOCAB_SIZE]}),
        ("suppressed_token_ids", {"suppressed_token_ids": [-1]}),
        ("suppressed_first_token_ids", {"suppressed_first_token_ids": [VOCAB_SIZE]}),
        ("timestamps.first_token_id", {"timestamps": rules(VOCAB_SIZE)}),
        ("suppressed_token_ids", {"suppressed_token_ids": 7}),
    ],
)
def test_ids_must_be_in_the_vocabulary(kind, field, fields):
    with pytest.raises(RequestError) as caught:
        processor().verify(kind(**fields))
    assert caught.value.field == field


def test_a_search_cannot_return_more_texts_than_may_begin():
    few: dict[str, Any] = {"suppressed_token_ids": list(range(10, VOCAB_SIZE)), "suppressed_first_token_ids": [1, 10]}
    free = len({*range(VOCAB_SIZE)} - {*range(10, VOCAB_SIZE)} - {1, END})
    params = BeamSearchParams(beam_width=32, n=free, **few)
    processor().verify(params)
    params.n += 1
    with pytest.raises(RequestError) as caught:
        processor().verify(params)
    assert caught.value.field == "n"
