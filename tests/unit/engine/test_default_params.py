"""Defaults of a model's files: what a request without params gets, and which rules every request has."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ratoon.core.errors import RequestError
from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.engine.input.default_params import (
    default_beam_search_params,
    default_params,
    default_sampling_params,
    with_given,
)
from ratoon.engine.input.input_processor import InputProcessor
from tests.unit.engine.fakes import byte_tokenizer, model_config

SUMMARY = {
    "num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "max_length": 142, "min_length": 56,
    "no_repeat_ngram_size": 3, "forced_eos_token_id": [2],
}  # fmt: skip


def completed(params: Any, defaults: dict[str, Any] | None = None, prompt: str = "hello") -> SamplingParams:
    processor = InputProcessor(model_config(max_position=200), byte_tokenizer(), defaults or {})
    return processor.process("r", prompt, params).params


def test_files_that_ask_for_beams_make_a_request_without_params_a_search():
    params = default_params(SUMMARY)
    assert params == BeamSearchParams(
        beam_width=4, length_penalty=2.0, early_stopping=True, max_tokens=None, max_length=142, min_length=56
    )
    assert default_sampling_params(SUMMARY) == SamplingParams(max_tokens=None, max_length=142, min_length=56)
    assert default_beam_search_params({"num_beams": 1}) is None and default_params({}) == SamplingParams()


def test_new_tokens_go_before_lengths_and_what_can_t_be_is_ignored(caplog: pytest.LogCaptureFixture):
    assert default_sampling_params({"max_new_tokens": 9, "max_length": 5}) == SamplingParams(max_tokens=9)
    assert default_sampling_params({"min_new_tokens": 30, "max_length": 50}).min_tokens == 30
    with caplog.at_level(logging.WARNING):
        assert default_params({"num_beams": 5000}) == SamplingParams()
        assert default_params({"num_beams": 2, "length_penalty": 99}) == BeamSearchParams(beam_width=2)
    assert "num_beams" in caplog.text and "length_penalty" in caplog.text


def test_a_least_length_of_the_files_gives_way_to_what_was_asked_for():
    defaults = SamplingParams(max_tokens=None, min_tokens=30)
    assert with_given(defaults, {"max_tokens": 8}).min_tokens == 8
    assert with_given(SamplingParams(min_length=56), {"min_tokens": 3}).min_length == 0
    with pytest.raises(RequestError, match="min_tokens"):
        with_given(defaults, {"max_tokens": 8, "min_tokens": 9}).verify()


def test_lengths_count_the_prompt():
    params = completed(SamplingParams(max_tokens=None, max_length=12, min_length=9))
    assert (params.max_tokens, params.min_tokens, params.max_length, params.min_length) == (7, 4, None, 0)
    assert completed(SamplingParams(max_tokens=3, max_length=12, min_length=90)).min_tokens == 3
    with pytest.raises(RequestError, match="max_length: 5 leaves nothing after a prompt of 5 tokens"):
        completed(SamplingParams(max_tokens=None, max_length=5))


def test_rules_that_are_left_open_are_the_models_own():
    defaults = {"no_repeat_ngram_size": 3, "forced_eos_token_id": [2], "bad_words_ids": [[4, 5]]}
    own = completed(SamplingParams(), defaults)
    assert (own.no_repeat_ngram_size, own.forced_eos_token_id, own.bad_words_ids) == (3, [2], [[4, 5]])
    none = SamplingParams(no_repeat_ngram_size=0, forced_eos_token_id=[], bad_words_ids=[])
    free = completed(none, defaults)
    assert (free.no_repeat_ngram_size, free.forced_eos_token_id, free.bad_words_ids) == (0, [], [])
    assert completed(SamplingParams(ignore_eos=True), defaults).forced_eos_token_id is None
    searched = completed(BeamSearchParams(beam_width=2), defaults)
    assert (searched.no_repeat_ngram_size, searched.forced_eos_token_id) == (3, [2])
    assert SamplingParams(forced_eos_token_id=7) == SamplingParams(forced_eos_token_id=[7])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [SamplingParams, lambda **fields: BeamSearchParams(beam_width=2, **fields)])
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"no_repeat_ngram_size": 257}, "no_repeat_ngram_size"),
        ({"encoder_no_repeat_ngram_size": 1.5}, "encoder_no_repeat_ngram_size"),
        ({"forced_eos_token_id": [10**6]}, "forced_eos_token_id"),
        ({"forced_eos_token_id": "end"}, "forced_eos_token_id"),
        ({"forced_eos_token_id": [1] * 17}, "forced_eos_token_id"),
        ({"bad_words_ids": [[]]}, r"bad_words_ids\[0\]"),
        ({"bad_words_ids": [[1], [10**6]]}, r"bad_words_ids\[1\]"),
        ({"bad_words_ids": [[1] * 65]}, r"bad_words_ids\[0\]"),
        ({"bad_words_ids": [[1]] * 4097}, "bad_words_ids"),
        ({"max_length": 0}, "max_length"),
        ({"min_length": -1}, "min_length"),
    ],
)
def test_a_rule_that_has_no_meaning_is_refused_by_name(kind: Any, fields: dict[str, Any], field: str):
    with pytest.raises(RequestError, match=f"^{field}: "):
        completed(kind(**fields))


def test_what_is_typical_for_a_model_is_the_default_of_its_requests():
    assert default_sampling_params({"typical_p": 0.9}).typical_p == 0.9
    assert default_sampling_params({}).typical_p == 1.0
