"""Formats of transcriptions: plain text, JSON in two sizes, subtitles (SRT and WebVTT)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from ratoon.transcription.results import Segment, Transcription
from ratoon.transcription.vocabulary import language_name
from ratoon.transcription.words import Word

FORMATS = ("text", "json", "verbose_json", "srt", "vtt")
SUFFIXES = {"text": "txt", "json": "json", "verbose_json": "json", "srt": "srt", "vtt": "vtt"}
MEDIA_TYPES = {
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}
SUBTITLES = ("srt", "vtt")


def render(transcription: Transcription, format: str) -> str:
    """The whole file, a line break at its end."""
    writers: dict[str, Callable[[Transcription], str]] = {
        "text": lambda transcription: transcription.text + "\n",
        "json": lambda transcription: json.dumps(as_dict(transcription), ensure_ascii=False) + "\n",
        "verbose_json": lambda transcription: json.dumps(as_verbose_dict(transcription), ensure_ascii=False) + "\n",
        "srt": as_srt,
        "vtt": as_vtt,
    }
    return writers[format](transcription)


def as_dict(transcription: Transcription) -> dict[str, Any]:
    """OpenAI's `json`. Usage is in seconds, rounded up."""
    usage = {"type": "duration", "seconds": math.ceil(transcription.duration)}
    return {"text": transcription.text, "usage": usage}


def as_verbose_dict(transcription: Transcription) -> dict[str, Any]:
    """OpenAI's `verbose_json`."""
    language = transcription.language
    return {
        "task": transcription.task,
        "language": None if language is None else language_name(language),
        "duration": round(transcription.duration, 3),
        **as_dict(transcription),
        **words_as_dict(transcription.words),
        "segments": [_segment_as_dict(index, segment) for index, segment in enumerate(transcription.segments)],
    }


def as_timed_dict(index: int, segment: Segment) -> dict[str, Any]:
    """A segment's number, times and text: what a stream says of it."""
    return {"id": index, "start": round(segment.start, 3), "end": round(segment.end, 3), "text": segment.text}


def words_as_dict(words: Sequence[Word] | None) -> dict[str, Any]:
    """OpenAI's `words`, or nothing where none were requested."""
    if words is None:
        return {}
    return {
        "words": [
            {"word": word.word.strip(), "start": round(word.start, 3), "end": round(word.end, 3)} for word in words
        ]
    }


def _segment_as_dict(index: int, segment: Segment) -> dict[str, Any]:
    return {
        **as_timed_dict(index, segment),
        "seek": segment.seek,
        "tokens": segment.tokens,
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def as_srt(transcription: Transcription) -> str:
    return "".join(
        f"{number}\n{_time(segment.start, ',')} --> {_time(segment.end, ',')}\n{_line(segment.text)}\n\n"
        for number, segment in enumerate(transcription.segments, start=1)
    )


def as_vtt(transcription: Transcription) -> str:
    cues = (
        f"{_time(segment.start, '.')} --> {_time(segment.end, '.')}\n{_without_markup(_line(segment.text))}\n\n"
        for segment in transcription.segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{point}{milliseconds:03d}"


def _line(text: str) -> str:
    """One line, without text that a player would parse as times."""
    return " ".join(text.split()).replace("-->", "->")


def _without_markup(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
