"""The real Whisper-tiny transcribes speech: the tokens of transformers, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ratoon import LLM
from tests.golden.engines import check_nothing_left
from tests.golden.real_whisper import GREEDY, SETTINGS, Oracle, beams, hear, text_of
from tests.golden.speech import JFK, JFK_TEXT, RATE, read_sentences, read_wav, word_error_rate, words_of
from tests.real_models import whisper_tiny

CUTS = [(0, 11), (2.5, 8), (0, 1), (4, 4.2), (5, 11)]  # seconds


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(whisper_tiny()), num_blocks=2000, **SETTINGS) as built:
        yield built
        check_nothing_left(built)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def jfk() -> np.ndarray:
    return read_wav(JFK)


def test_the_published_words_are_heard(llm: LLM, jfk: np.ndarray) -> None:
    assert llm.reset_prefix_cache()
    before = llm.stats().num_encoder_runs
    for params in (GREEDY, beams(5)):
        assert words_of(text_of(llm, hear(llm, [jfk], params)[0])) == words_of(JFK_TEXT)
    assert llm.stats().num_encoder_runs - before == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [1, 5])
@pytest.mark.one_in(2)
def test_the_tokens_are_those_of_transformers(llm: LLM, oracle: Oracle, jfk: np.ndarray, num_beams: int) -> None:
    params = GREEDY if num_beams == 1 else beams(num_beams)
    assert hear(llm, [jfk], params)[0] == oracle.hear(jfk, num_beams)


@pytest.mark.slow
@pytest.mark.full
def test_clips_in_a_batch_are_heard_as_each_alone(llm: LLM, jfk: np.ndarray) -> None:
    clips = [jfk[int(start * RATE) : int(end * RATE)] for start, end in CUTS]
    together = hear(llm, clips)
    assert len({tuple(tokens) for tokens in together}) == len(clips)
    assert llm.reset_prefix_cache()
    before = llm.stats().num_encoder_runs
    assert together == [hear(llm, [clip])[0] for clip in clips]
    assert llm.stats().num_encoder_runs - before == len(clips)


@pytest.mark.slow
@pytest.mark.full
def test_no_more_words_are_misheard_than_by_transformers(llm: LLM, oracle: Oracle) -> None:
    sentences = read_sentences()[::2]  # with and without noise
    spoken = [sentence.text for sentence in sentences]
    ours = hear(llm, [sentence.samples for sentence in sentences])
    theirs = [oracle.hear(sentence.samples) for sentence in sentences]
    our_rate, their_rate = (
        word_error_rate(spoken, [text_of(llm, tokens) for tokens in heard]) for heard in (ours, theirs)
    )
    assert our_rate <= their_rate < 0.4
    assert ours == theirs


@pytest.mark.parametrize(
    ("spoken", "heard", "rate"),
    [
        (["One, two three."], ["one two THREE"], 0.0),
        (["one two three four"], ["one too three four"], 1 / 4),
        (["one two three four"], ["one three four five six"], 3 / 4),
        (["one two", "three four"], ["", "three four"], 2 / 4),
        (["one"], ["two three"], 2.0),
    ],
)
def test_errors_are_counted_in_words(spoken: list[str], heard: list[str], rate: float) -> None:
    assert word_error_rate(spoken, heard) == rate
