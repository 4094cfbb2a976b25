"""The tokens of an answered conversation beside its text, and how much of them the next turn can inherit.

The next turn's prompt is the whole conversation as the chat template writes it. The template may write earlier turns
in another way than the model did (it drops reasoning, or formats calls anew), and the model may have written a text in
other tokens than the tokenizer would. So texts are compared first, segment by segment: a segment that the new prompt
repeats is inherited with the tokens that it has. From the first other one on, the new text is tokenised, and inherited
as far as its tokens are the same. Of a segment's text only a hash is kept: the conversation has the text already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ratoon.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Segment:
    digest: bytes  # of its text
    num_chars: int
    num_tokens: int

    @classmethod
    def of(cls, text: str, num_tokens: int) -> Segment:
        return cls(_digest(text), len(text), num_tokens)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


Transcript = tuple[Segment, ...]  # of all tokens of an answer's root, prompt and answer


class Shared(NamedTuple):
    """What a new prompt has in common with a transcript, by segments."""

    segments: Transcript
    num_chars: int
    num_tokens: int


def shared_segments(transcript: Transcript, prompt: str) -> Shared:
    """Returns the segments at the beginning that are also the beginning of the prompt."""
    num_chars = num_tokens = count = 0
    for segment in transcript:
        if _digest(prompt[num_chars : num_chars + segment.num_chars]) != segment.digest:
            break
        count += 1
        num_chars += segment.num_chars
        num_tokens += segment.num_tokens
    return Shared(transcript[:count], num_chars, num_tokens)


STRETCH = 1024


def num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns the length of the common beginning of two token sequences."""
    limit = min(len(left), len(right))
    start = 0
    while start < limit and left[start : start + STRETCH] == right[start : start + STRETCH]:
        start += STRETCH  # whole stretches are compared much faster
    return next((index for index in range(start, limit) if left[index] != right[index]), limit)


def answer_segments(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Transcript:
    """Returns the segments of an answer's tokens. A special token at the end is a segment of its own: templates may end
    a turn in another way."""
    end = len(token_ids)
    if end and token_ids[-1] in tokenizer.special_token_ids:
        end -= 1
    pieces = (token_ids[:end], token_ids[end:])
    return tuple(Segment.of(tokenizer.decode(piece, False), len(piece)) for piece in pieces if piece)
