"""The tokens of a window to segments with times, and how far the window was read. Pure, and as openai-whisper does it.

A text with timestamps looks like <0.00> one <2.00><2.00> two <4.50>: what stands between two is a segment. The last one
may break off where the window ends. Then it is dropped, and the next window begins at the last end of a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ratoon.api.transcription.vocabulary import SECONDS_OF_TIMESTAMP, SpeechVocabulary
from ratoon.models.log_mel import FRAMES_PER_SECOND

FRAMES_OF_TIMESTAMP = round(SECONDS_OF_TIMESTAMP * FRAMES_PER_SECOND)


class Span(NamedTuple):
    """A segment's place in a window, in seconds from there, and its tokens."""

    start: float
    end: float
    tokens: list[int]


def split_window(tokens: Sequence[int], vocabulary: SpeechVocabulary, num_frames: int) -> tuple[list[Span], int]:
    """The segments of a window with timestamps, and the frames of it (of so many that it has) that are done."""
    first = vocabulary.first_timestamp
    is_timestamp = [token >= first for token in tokens]
    # A pair of timestamps is the end of a segment and the start of the next.
    starts = [place for place in range(1, len(tokens)) if is_timestamp[place - 1] and is_timestamp[place]]
    ends_with_one = is_timestamp[-2:] == [False, True]
    if not starts:
        return [_only_span(tokens, vocabulary, num_frames)], num_frames
    stops = [*starts, len(tokens)] if ends_with_one else starts
    spans = []
    begin = 0
    for stop in stops:
        part = list(tokens[begin:stop])
        start, end = _seconds(part[0], first), _seconds(part[-1], first)
        spans.append(Span(start, end, part))
        begin = stop
    if ends_with_one:  # there is no speech behind it
        return spans, num_frames
    num_done = (tokens[begin - 1] - first) * FRAMES_OF_TIMESTAMP
    # Where nothing was done, nothing ever would be.
    return spans, num_done if num_done > 0 else num_frames


def _only_span(tokens: Sequence[int], vocabulary: SpeechVocabulary, num_frames: int) -> Span:
    first = vocabulary.first_timestamp
    last = next((token for token in reversed(tokens) if token >= first), first)
    end = _seconds(last, first) if last > first else num_frames / FRAMES_PER_SECOND
    return Span(0.0, end, list(tokens))


def _seconds(token: int, first: int) -> float:
    return max(token - first, 0) * SECONDS_OF_TIMESTAMP
