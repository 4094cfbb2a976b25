"""How much of an answered conversation a new prompt repeats, by text and by tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ratoon.api.server.transcripts import Segment, answer_segments, num_equal, shared_segments
from tests.unit.api.server.harness import END, byte_tokenizer

TEXTS = st.text("ab", max_size=6)


@given(st.lists(TEXTS, max_size=5), TEXTS)
def test_shared_segments_are_a_beginning_of_both(texts, prompt):
    transcript = tuple(Segment.of(text, len(text)) for text in texts)
    shared = shared_segments(transcript, prompt)
    assert transcript[: len(shared.segments)] == shared.segments
    assert prompt.startswith("".join(texts[: len(shared.segments)]))
    assert shared.num_chars == shared.num_tokens == sum(map(len, texts[: len(shared.segments)]))
    if len(shared.segments) < len(texts):
        assert not prompt.startswith("".join(texts[: len(shared.segments) + 1]))


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_equal_tokens_are_counted_up_to_the_first_other_one(left, right):
    count = num_equal(left, right)
    assert left[:count] == right[:count]
    assert count == min(len(left), len(right)) or left[count] != right[count]


def test_long_sequences_are_compared_to_the_first_other_token():
    for length in (1023, 1024, 1025, 5000):
        tokens = list(range(length))
        assert num_equal(tokens, tokens) == num_equal(tokens, [*tokens, 1]) == length
        for other in (0, length // 2, length - 1):
            assert num_equal(tokens, [*tokens[:other], -1, *tokens[other + 1 :]]) == other


def test_the_end_of_a_turn_is_a_segment_of_its_own():
    tokenizer = byte_tokenizer()
    assert answer_segments(tokenizer, [*b"Hi", END]) == (Segment.of("Hi", 2), Segment.of("<|end|>", 1))
    assert answer_segments(tokenizer, list(b"Hi")) == (Segment.of("Hi", 2),)
    assert answer_segments(tokenizer, [END]) == (Segment.of("<|end|>", 1),)
    assert answer_segments(tokenizer, []) == ()
