"""/v1/audio/transcriptions and /v1/audio/translations: a recording as text. Requests are forms, so values are text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from ratoon.api.server.protocol.base import AnswerModel, Entries, Int, RequestId, RequestModel

Granularities = Annotated[
    Entries[Literal["segment", "word"]], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]
Recording = Annotated[bytes, WithJsonSchema({"type": "string", "format": "binary"})]


class TranslationRequest(RequestModel):
    model_config = ConfigDict(strict=False, extra="forbid", allow_inf_nan=False)

    file: Recording = Field(description="The recording, in any common container and codec")
    model: str = Field(min_length=1, description="The served model's name")
    prompt: str | None = Field(None, description="Text before the recording: names to spell right, a style")
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: float | None = Field(
        None, ge=0, le=1, description="0, or left out: none, and as much as it takes where a text is no good"
    )

    # Extensions
    language: str | None = Field(None, description="What is spoken: a code or a name; found out where it is left out")
    stream: bool | None = Field(None, description="Send segments as they are found")
    beam_size: Int | None = Field(None, description="Search with so many beams; greedy where it is left out")
    priority: Int | None = Field(None, description="Lower goes first; needs --policy priority")
    cache_salt: str | None = Field(None, description="Requests with different salts share nothing that is cached")
    request_id: RequestId | None = Field(None)


class TranscriptionRequest(TranslationRequest):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "include": "log-probabilities of a transcription do not exist here; verbose_json has their mean",
        "chunking_strategy": "windows follow the segments that the model finds; leave it out",
        "known_speaker_names": "who speaks is not found out here; leave it out",
        "known_speaker_references": "who speaks is not found out here; leave it out",
    }

    timestamp_granularities: Granularities | None = Field(
        None, description="segment: in verbose_json, always; word: not here"
    )


class AudioUsage(AnswerModel):
    type: Literal["duration"]
    seconds: int


class SegmentAnswer(AnswerModel):
    id: int
    seek: int = Field(description="Where the window begins that it was found in, in hundredths of a second")
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None


class TranscriptionAnswer(AnswerModel):
    """`json` has the first two."""

    text: str
    usage: AudioUsage
    task: Literal["transcribe", "translate"] | None = None
    language: str | None = Field(None, description="Its name, in English")
    duration: float | None = None
    segments: list[SegmentAnswer] | None = None


class TranscriptionEvent(AnswerModel):
    """transcript.text.delta, for each segment, and at the end transcript.text.done."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | None = None
    text: str | None = None
    usage: AudioUsage | None = None
