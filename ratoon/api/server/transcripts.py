"""The tokens of an answered conversation beside its text, and how much of them the next turn can inherit.

The next turn's prompt is the whole conversation as the chat template writes it. The template may write earlier turns
in another way than the model did (it drops reasoning, or formats calls anew), and the model may have written a text in
other tokens than the tokenizer would. So texts are compared first, segment by segment: a segment that the new prompt
repeats is inherited with the tokens that it has. From the first other one on, the new text is tokenised, and inherited
as far as its tokens are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ratoon.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Segment:
    text: str
    num_tokens: int


Transcript = tuple[Segment, ...]  # of all tokens of an answer's root, prompt and answer


class Shared(NamedTuple):
    """What a new prompt has in common with a transcript, by segments."""

    segments: Transcript
    num_chars: int
    num_tokens: int


def shared_segments(transcript: Transcript, prompt: str) -> Shared:
    """The segments at the beginning that are also the beginning of the prompt."""
    num_chars = num_tokens = count = 0
    for segment in transcript:
        if not prompt.startswith(segment.text, num_chars):
            break
        count += 1
        num_chars += len(segment.text)
        num_tokens += segment.num_tokens
    return Shared(transcript[:count], num_chars, num_tokens)


def num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the common beginning of two token sequences."""
    limit = min(len(left), len(right))
    return next((index for index in range(limit) if left[index] != right[index]), limit)


def answer_segments(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Transcript:
    """Of an answer's tokens. A special token at the end is a segment of its own: templates may end a turn in another
    way."""
    end = len(token_ids)
    if end and token_ids[-1] in tokenizer.special_token_ids:
        end -= 1
    pieces = (token_ids[:end], token_ids[end:])
    return tuple(Segment(tokenizer.decode(piece, False), len(piece)) for piece in pieces if piece)
