"""Tokens of a window to segments, and how far the window was read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.transcription.windows import split_window
from tests.unit.transcription.speech import FIRST_TIMESTAMP, tokens_of, vocabulary


def split(text: str, num_frames: int = 3000):
    spans, num_done = split_window(tokens_of(text), vocabulary(), num_frames)
    return [
        (round(span.start, 2), round(span.end, 2), vocabulary().decode_text(span.tokens)) for span in spans
    ], num_done


@pytest.mark.parametrize(
    ("text", "segments", "num_done"),
    [
        pytest.param("<0.00> one<2.00>", [(0, 2, " one")], 3000, id="one segment, and silence behind it"),
        pytest.param("<0.50> one<2.00>", [(0, 2, " one")], 3000, id="a single segment begins with the window"),
        pytest.param("<0.00> one<2.00><2.00>", [(0, 2, " one")], 200, id="a pair at the end: speech goes on"),
        pytest.param(
            "<0.00> one<2.00><2.00> two<4.50>", [(0, 2, " one"), (2, 4.5, " two")], 3000, id="two, and silence"
        ),
        pytest.param("<0.00> one<2.00><3.00> tw", [(0, 2, " one")], 200, id="the second breaks off, and is read again"),
        pytest.param(
            "<0.00> a<1.00><1.20> b<2.00><2.00>", [(0, 1, " a"), (1.2, 2, " b")], 200, id="a gap between segments"
        ),
        pytest.param("<0.00> one", [(0, 30, " one")], 3000, id="no end: the whole window"),
        pytest.param("one", [(0, 30, "one")], 3000, id="no timestamps at all"),
        pytest.param("", [(0, 30, "")], 3000, id="nothing"),
        pytest.param("<0.00><0.00>", [(0, 0, "")], 3000, id="what would never go on"),
    ],
)
def test_windows(text, segments, num_done):
    assert split(text) == (segments, num_done)


def test_the_last_window_of_a_recording_may_be_short():
    assert split("<0.00> one", 450) == ([(0, 4.5, " one")], 450)


@given(st.lists(st.integers(0, FIRST_TIMESTAMP + 1500), max_size=40), st.integers(1, 3000))
def test_whatever_a_model_says_the_next_window_begins_later(tokens, num_frames):
    spans, num_done = split_window(tokens, vocabulary(), num_frames)
    assert num_done > 0
    assert all(token in tokens for span in spans for token in span.tokens)
