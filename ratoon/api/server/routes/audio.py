"""POST /v1/audio/transcriptions and /v1/audio/translations: speech to text. Requests are forms."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.errors import refused
from ratoon.api.server.exchange import Exchange, exchange_of
from ratoon.api.server.generation import make_id
from ratoon.api.server.openapi import MODEL, WITH_BODY, answers, form
from ratoon.api.server.protocol.base import AnswerModel, Entries, Int, ModelName, RequestId, RequestModel
from ratoon.api.server.request_bodies import read_form
from ratoon.api.server.responses import EventStream, event, json_response
from ratoon.core.errors import RequestError
from ratoon.transcription.formats import (
    MEDIA_TYPES,
    SUBTITLES,
    as_dict,
    as_timed_dict,
    as_verbose_dict,
    render,
    words_as_dict,
)
from ratoon.transcription.options import TEMPERATURES, Task, TranscriptionOptions

if TYPE_CHECKING:
    from ratoon.transcription.results import Transcription
    from ratoon.transcription.transcriber import Transcriber


Granularities = Annotated[
    Entries[Literal["segment", "word"]], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]
Recording = Annotated[bytes, WithJsonSchema({"type": "string", "format": "binary"})]


class TranslationRequest(RequestModel):
    model_config = ConfigDict(strict=False, extra="ignore", allow_inf_nan=False)

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "timestamp_granularities": "verbose_json has segments; a transcription takes this field",
    }

    file: Recording = Field(description="The recording, in any common container and codec")
    model: ModelName
    prompt: str | None = Field(None, description="Context before the recording: spelling of names, a style")
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: float | None = Field(None, ge=0, le=1, description="Default: 0, raised where a text is rejected")

    # Extensions
    language: str | None = Field(None, description="The spoken language: a code or a name; default: detected")
    stream: bool | None = Field(None, description="Send segments as they are found")
    beam_size: Int | None = Field(None, description="Number of beams; default: greedy")
    priority: Int | None = Field(None, description="Lower goes first; needs --policy priority")
    cache_salt: str | None = Field(None, description="Requests with different salts share no cached data")
    request_id: RequestId | None = Field(None)


class TranscriptionRequest(TranslationRequest):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "include": "verbose_json has the mean log-probability of each segment",
        "chunking_strategy": "windows follow the segments that the model finds; leave it out",
        "known_speaker_names": "who speaks is not found out here; leave it out",
        "known_speaker_references": "who speaks is not found out here; leave it out",
    }

    timestamp_granularities: Granularities | None = Field(
        None, description="segment: always in verbose_json; word: there, and with stream in its events, on request"
    )


class AudioUsage(AnswerModel):
    type: Literal["duration"]
    seconds: int


class SegmentAnswer(AnswerModel):
    id: int
    seek: int = Field(description="Start of the segment's window, in hundredths of a second")
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None


class WordAnswer(AnswerModel):
    word: str
    start: float
    end: float


class TranscriptionAnswer(AnswerModel):
    """`json` has the first two."""

    text: str
    usage: AudioUsage
    task: Literal["transcribe", "translate"] | None = None
    language: str | None = Field(None, description="Its name, in English")
    duration: float | None = None
    words: list[WordAnswer] | None = Field(None, description="If word timestamps were requested")
    segments: list[SegmentAnswer] | None = None


class TranscriptionEvent(AnswerModel):
    """transcript.text.delta, for each segment, and at the end transcript.text.done. With verbose_json, each delta is
    followed by transcript.text.segment, and the last event has the fields of that format."""

    type: Literal["transcript.text.delta", "transcript.text.segment", "transcript.text.done"]
    delta: str | None = None
    id: int | None = Field(None, description="Of a segment: its number")
    start: float | None = Field(None, description="Of a segment: seconds from the beginning of the recording")
    end: float | None = None
    words: list[WordAnswer] | None = Field(None, description="Those of the delta, if word timestamps were requested")
    text: str | None = None
    usage: AudioUsage | None = None
    task: Literal["transcribe", "translate"] | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[SegmentAnswer] | None = None


router = APIRouter(tags=["OpenAI"])
EXAMPLE = {"model": MODEL, "response_format": "json"}
ANSWERS = answers(
    TranscriptionAnswer,
    *(*WITH_BODY, 404, 409, 429),
    stream_of=TranscriptionEvent,
    files=[kind.split(";")[0] for kind in MEDIA_TYPES.values()],
)


@router.post(
    "/v1/audio/transcriptions",
    summary="Transcribe a recording",
    responses=ANSWERS,
    openapi_extra=form(TranscriptionRequest, EXAMPLE),
)
async def create_transcription(request: Request) -> Response:
    asked = await read_form(request, TranscriptionRequest)
    words = "word" in (asked.timestamp_granularities or ())
    if words and not asked.stream and asked.response_format != "verbose_json":
        problem = f"{asked.response_format} has no place for word timestamps"
        raise refused("timestamp_granularities", problem, "the response_format verbose_json, or stream")
    return await _answer(request, asked, "transcribe", words)


@router.post(
    "/v1/audio/translations",
    summary="Translate a recording to English text",
    responses=ANSWERS,
    openapi_extra=form(TranslationRequest, EXAMPLE),
)
async def create_translation(request: Request) -> Response:
    return await _answer(request, await read_form(request, TranslationRequest), "translate")


async def _answer(request: Request, asked: TranslationRequest, task: Task, words: bool = False) -> Response:
    context = context_of(request)
    context.check_model(asked.model)
    options = _options(asked, task, words)
    exchange = exchange_of(request.scope)
    tenant = exchange.tenant
    transcriber = _transcriber(context, asked, exchange)
    if words:
        try:
            transcriber.vocabulary.verify_words()
        except RequestError as error:  # under the name that the form has
            raise refused("timestamp_granularities", error.problem, error.expected) from None
    if asked.stream:
        if asked.response_format in SUBTITLES:
            raise refused("response_format", f"{asked.response_format} is not streamed", "json, verbose_json or text")
        with_segments = asked.response_format == "verbose_json"
        events = _events(context, transcriber, asked.file, options, tenant, with_segments)
        first = await anext(events, b"")  # errors until then get an HTTP status
        return EventStream(first, events, exchange_of(request.scope).headers())
    async with context.admit(1, tenant):
        transcription = await transcriber.transcribe(asked.file, options)
    return _whole(request, transcription, asked.response_format)


def _options(asked: TranslationRequest, task: Task, words: bool) -> TranscriptionOptions:
    options = TranscriptionOptions(
        language=asked.language,
        task=task,
        word_timestamps=words,
        prompt=asked.prompt,
        temperature=asked.temperature or TEMPERATURES,
        beam_size=asked.beam_size,
    )
    options.verify()
    return options


def _transcriber(context: ServerContext, asked: TranslationRequest, exchange: Exchange) -> Transcriber:
    from ratoon.transcription.audio import AudioLimits
    from ratoon.transcription.transcriber import async_transcriber  # with numpy, which other routes do not import

    settings = context.settings
    return async_transcriber(
        context.llm,
        limits=AudioLimits(max_seconds=settings.max_audio_seconds, max_bytes=settings.max_audio),
        request_id=make_id("trsc", asked.request_id),
        adapter=context.check_model(asked.model),
        priority=asked.priority or 0,
        cache_salt=asked.cache_salt,
        owner=exchange.tenant,
        trace_headers=exchange.trace_headers,
    )


def _whole(request: Request, transcription: Transcription, format: str) -> Response:
    if format in MEDIA_TYPES:
        headers = exchange_of(request.scope).headers()
        return Response(render(transcription, format), headers=headers, media_type=MEDIA_TYPES[format])
    return json_response(request, (as_verbose_dict if format == "verbose_json" else as_dict)(transcription))


async def _events(
    context: ServerContext,
    transcriber: Transcriber,
    audio: bytes,
    options: TranscriptionOptions,
    tenant: str | None,
    with_segments: bool,
) -> AsyncGenerator[bytes, None]:
    """Yields a delta for each segment, and its times if they are asked for. A window's segments are sent when its text
    is final."""
    transcription: Transcription | None = None
    async with context.admit(1, tenant), aclosing(transcriber.follow(audio, options)) as news:
        async for progress in news:
            transcription = progress.transcription
            body = b""
            for number, segment in enumerate(progress.segments, len(transcription.segments) - len(progress.segments)):
                text = segment.text if number else segment.text.lstrip()
                body += event({"type": "transcript.text.delta", "delta": text, **words_as_dict(segment.words)})
                if with_segments:
                    body += event({"type": "transcript.text.segment", **as_timed_dict(number, segment)})
            if body:
                yield body
    assert transcription is not None
    whole = as_verbose_dict(transcription) if with_segments else as_dict(transcription)
    yield event({"type": "transcript.text.done", **whole})
