"""Whisper's special tokens: found by name, put together to decoder prompts."""

from __future__ import annotations

import pytest

from ratoon.core.errors import RequestError
from ratoon.transcription.vocabulary import find_vocabulary
from tests.unit.transcription.speech import (
    ENGLISH,
    FIRST_TIMESTAMP,
    GERMAN,
    NO_TIMESTAMPS,
    PREVIOUS,
    START,
    TRANSCRIBE,
    TRANSLATE,
    english_vocabulary,
    speech_config,
    speech_tokenizer,
    vocabulary,
)


def test_a_prompt_says_language_and_task():
    assert vocabulary().prompt("en", "transcribe", timestamps=True) == [START, ENGLISH, TRANSCRIBE]
    assert vocabulary().prompt("de", "translate", timestamps=False) == [START, GERMAN, TRANSLATE, NO_TIMESTAMPS]


def test_a_model_that_knows_only_english_is_not_told_a_language_or_task():
    english = english_vocabulary()
    assert english.prompt("en", "transcribe", timestamps=True) == [START]
    assert english.prompt("en", "transcribe", timestamps=False) == [START, NO_TIMESTAMPS]
    assert english.language_code("English") == "en"
    with pytest.raises(RequestError, match="language: 'de' is not supported by the model"):
        english.language_code("de")
    with pytest.raises(RequestError, match="task: the model only supports English"):
        english.verify_task("translate")


def test_a_tokenizer_without_languages_belongs_to_a_model_that_knows_only_english():
    tokenizer = speech_tokenizer(("<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"))
    found = find_vocabulary(tokenizer, speech_config(), {})
    assert not found.is_multilingual
    assert (found.previous, found.no_speech) == (None, None)
    assert found.prompt("en", "transcribe", False, previous=[1, 2]) == [257, 258]


def test_text_that_came_before_stands_in_front_and_is_cut_from_its_beginning():
    prompt = vocabulary().prompt("en", "transcribe", True, previous=list(range(100)) * 3)
    assert prompt[0] == PREVIOUS
    assert prompt[1:224] == (list(range(100)) * 3)[-223:]
    assert prompt[224:] == [START, ENGLISH, TRANSCRIBE]


@pytest.mark.parametrize("language", ["de", "DE", " german ", "German", "<|de|>"])
def test_languages_go_by_code_or_name(language):
    assert vocabulary().language_code(language) == "de"


def test_a_language_that_the_model_does_not_know_is_refused_with_those_that_it_does():
    with pytest.raises(RequestError) as caught:
        vocabulary().language_code("klingon")
    assert str(caught.value) == "language: 'klingon' is not supported by the model; one of en, de, fr, yue"


def test_special_tokens_in_a_prompt_are_refused():
    assert vocabulary().encode_text(" Ratoon ") == list(b" Ratoon")
    assert vocabulary().encode_text("  ") == []
    with pytest.raises(RequestError, match="prompt: contains a special token"):
        vocabulary().encode_text("good <|endoftext|> evil")


def test_the_rules_for_timestamps_name_the_tokens_of_this_model():
    rules = vocabulary().timestamp_rules
    assert (rules.first_token_id, rules.no_timestamps_token_id, rules.end_token_id) == (FIRST_TIMESTAMP, 267, 256)
    assert rules.max_initial_index == 50
    told = find_vocabulary(speech_tokenizer(), speech_config(), {"max_initial_timestamp_index": 1})
    assert told.timestamp_rules.max_initial_index == 1
    rules.verify()


def test_a_model_with_other_tokens_is_refused():
    with pytest.raises(RequestError, match="model: reads audio, but has other tokens"):
        find_vocabulary(speech_tokenizer(("<|endoftext|>",)), speech_config(), {})


@pytest.mark.parametrize("heads", [None, [], "all", [[0]], [[0, 9]], [[99, 0]], [[0, 1], [0, True]], [[-1, 0]]])
def test_alignment_heads_that_the_model_does_not_have_are_none(heads):
    assert find_vocabulary(speech_tokenizer(), speech_config(), {"alignment_heads": heads}).alignment_heads == ()


def test_alignment_heads_and_the_width_of_the_filter_come_from_the_files():
    told = {"alignment_heads": [[0, 1], [1, 0], [0, 1]], "median_filter_width": 5}
    found = find_vocabulary(speech_tokenizer(), speech_config(), told)
    assert (found.alignment_heads, found.median_width) == (((0, 1), (1, 0)), 5)
    assert find_vocabulary(speech_tokenizer(), speech_config(), {"median_filter_width": 4}).median_width == 7
