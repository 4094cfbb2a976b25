"""Formats, to the letter."""

from __future__ import annotations

import json

from ratoon.transcription.formats import FORMATS, SUFFIXES, render
from ratoon.transcription.results import Segment, Transcription


def segment(start: float, end: float, text: str) -> Segment:
    return Segment(start, end, text, [1, 2], 0, 0.2, -0.25, 1.5, 0.01)


TALK = Transcription(
    task="transcribe",
    language="de",
    language_probability=0.9,
    duration=3725.5,
    segments=[segment(0, 2.5, " Guten Tag,"), segment(2.5, 3723.04, " a --> b\n& <c>.")],
)


def test_text():
    assert render(TALK, "text") == "Guten Tag, a --> b\n& <c>.\n"


def test_srt():
    assert render(TALK, "srt") == (
        "1\n00:00:00,000 --> 00:00:02,500\nGuten Tag,\n\n2\n00:00:02,500 --> 01:02:03,040\na -> b & <c>.\n\n"
    )


def test_vtt():
    assert render(TALK, "vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nGuten Tag,\n\n00:00:02.500 --> 01:02:03.040\na -> b &amp; &lt;c>.\n\n"
    )


def test_json():
    text = "Guten Tag, a --> b\n& <c>."
    usage = {"type": "duration", "seconds": 3726}
    assert json.loads(render(TALK, "json")) == {"text": text, "usage": usage}


def test_verbose_json():
    found = json.loads(render(TALK, "verbose_json"))
    assert found.pop("segments")[0] == {
        "id": 0,
        "seek": 0,
        "start": 0,
        "end": 2.5,
        "text": " Guten Tag,",
        "tokens": [1, 2],
        "temperature": 0.2,
        "avg_logprob": -0.25,
        "compression_ratio": 1.5,
        "no_speech_prob": 0.01,
    }
    assert found == {
        "task": "transcribe",
        "language": "german",
        "duration": 3725.5,
        "text": "Guten Tag, a --> b\n& <c>.",
        "usage": {"type": "duration", "seconds": 3726},
    }


def test_times_are_rounded_to_milliseconds_and_carry_over():
    talk = Transcription("transcribe", segments=[segment(59.9996, 3599.9999, "x")])
    assert "00:01:00,000 --> 01:00:00,000" in render(talk, "srt")


def test_silence_has_every_form():
    silence = Transcription("transcribe", language="en", duration=1.0)
    assert [render(silence, name) for name in ("text", "srt", "vtt")] == ["\n", "", "WEBVTT\n\n"]
    assert json.loads(render(silence, "verbose_json"))["segments"] == []
    assert set(SUFFIXES) == set(FORMATS)
