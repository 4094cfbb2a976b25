"""How much of an answered conversation a new prompt repeats, by text and by tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ratoon.api.server.transcripts import Segment, answer_segments, num_equal, shared_segments
from tests.unit.api.server.harness import END, byte_tokenizer

TEXTS = st.text("ab", max_size=6)


@given(st.lists(TEXTS, max_size=5), TEXTS)
def test_shared_segments_are_a_beginning_of_both(texts, prompt):
    transcript = tuple(Segment(text, len(text)) for text in texts)
    shared = shared_segments(transcript, prompt)
    assert transcript[: len(shared.segments)] == shared.segments
    assert prompt.startswith("".join(segment.text for segment in shared.segments))
    assert shared.num_chars == shared.num_tokens == sum(len(segment.text) for segment in shared.segments)
    if len(shared.segments) < len(texts):
        assert not prompt.startswith("".join(texts[: len(shared.segments) + 1]))


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_equal_tokens_are_counted_up_to_the_first_other_one(left, right):
    count = num_equal(left, right)
    assert left[:count] == right[:count]
    assert count == min(len(left), len(right)) or left[count] != right[count]


def test_the_end_of_a_turn_is_a_segment_of_its_own():
    tokenizer = byte_tokenizer()
    assert answer_segments(tokenizer, [*b"Hi", END]) == (Segment("Hi", 2), Segment("<|end|>", 1))
    assert answer_segments(tokenizer, list(b"Hi")) == (Segment("Hi", 2),)
    assert answer_segments(tokenizer, [END]) == (Segment("<|end|>", 1),)
    assert answer_segments(tokenizer, []) == ()
