"""A recording of any length to its text, window by window, and the transcriber of an AsyncLLM. Windows are transcribed
in windows.py.

With timestamps, a window begins where the last segment of the one before has ended, so they are read one after the
other. Without, they lie side by side and are read together. Either way many recordings can be under way at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ratoon.core.errors import QueueFullError, RequestError, UnknownParentError
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import GenerationParams, HiddenStatesParams
from ratoon.models.log_mel import FRAMES_PER_SECOND, WINDOW_FRAMES
from ratoon.models.tokenizer import Tokenizer, read_json
from ratoon.transcription.audio import Audio, AudioLimits, Recording, read_recording
from ratoon.transcription.options import TranscriptionOptions
from ratoon.transcription.results import Progress, Segment, Transcription
from ratoon.transcription.vocabulary import SpeechVocabulary, find_vocabulary, plain_vocabulary
from ratoon.transcription.windows import (
    Generate,
    Span,
    WindowReader,
    WindowText,
    checked_output,
    checked_weights,
    split_window,
    window_prompt,
)
from ratoon.transcription.words import Word, find_words

if TYPE_CHECKING:
    from ratoon.engine.async_llm import AsyncLLM
    from ratoon.models.source import ModelSource


MAX_WINDOWS = 32  # of one recording, in the engine at a time
PAUSES = (0.02, 0.05, 0.1, 0.2)  # seconds, before weights are asked for again that there was no room for
HIGHEST_TEMPERATURE_TO_TRUST = 0.5  # a text that took more of it says nothing to the next window


@dataclass(frozen=True, slots=True)
class Transcriber:
    generate: Generate
    vocabulary: SpeechVocabulary
    num_mel_bins: int | None  # None: the model reads samples as they are
    limits: AudioLimits = field(default_factory=AudioLimits)

    async def transcribe(self, audio: Audio, options: TranscriptionOptions) -> Transcription:
        """RequestError: the recording can't be read, or an option is invalid; EngineError: it failed."""
        transcription: Transcription | None = None
        async with aclosing(self.follow(audio, options)) as news:
            async for progress in news:
                transcription = progress.transcription
        assert transcription is not None
        return transcription

    async def follow(self, audio: Audio, options: TranscriptionOptions) -> AsyncGenerator[Progress, None]:
        """Transcribes a recording and yields news: at first that it was decoded, then after each window. The last has
        all of it."""
        language, prompt = self.check(options)
        if not self.vocabulary.has_timestamps:
            options = replace(options, timestamps=False)
        recording = await read_recording(audio, self.num_mel_bins, self.limits)
        transcription = Transcription(
            options.task, duration=recording.duration, word_timestamps=options.word_timestamps
        )
        yield Progress(transcription, [], 0.0)

        reader = WindowReader(self.generate, self.vocabulary, options)
        if language is None:
            language, transcription.language_probability = await self._language(reader, recording)
        transcription.language = language or None
        read = _one_by_one if options.timestamps else _all_at_once
        async with aclosing(read(reader, recording, language, prompt)) as windows:
            async for segments, num_frames_done in windows:
                transcription.segments += segments
                seconds_done = min(num_frames_done / FRAMES_PER_SECOND, recording.duration)
                yield Progress(transcription, segments, seconds_done)

    def check(self, options: TranscriptionOptions) -> tuple[str | None, list[int]]:
        """The language, if one is given, and the tokens of the prompt. RequestError: an option is invalid."""
        options.verify()
        self.vocabulary.verify_task(options.task)
        if options.word_timestamps:
            self.vocabulary.verify_words()
        if options.condition_on_previous_text:
            self.vocabulary.verify_context("condition_on_previous_text")
        if options.prompt:
            self.vocabulary.verify_context("prompt")
        language = None if options.language is None else self.vocabulary.language_code(options.language)
        return language, self.vocabulary.encode_text(options.prompt or "")

    async def _language(self, reader: WindowReader, recording: Recording) -> tuple[str, float | None]:
        if not self.vocabulary.is_multilingual:
            return self.vocabulary.only_language, None
        return await reader.detect_language(recording.window(0))


Windows = AsyncGenerator[tuple[list[Segment], int], None]  # of each window its segments, and the frames done so far


async def _one_by_one(reader: WindowReader, recording: Recording, language: str, prompt: list[int]) -> Windows:
    said: list[int] = []  # the context of the next window
    seek = 0
    while seek < _num_frames(recording):
        num_frames = min(WINDOW_FRAMES, _num_frames(recording) - seek)
        text = await reader.read(recording.window(seek), language, prompt + said, num_frames)
        segments: list[Segment] = []
        num_done = num_frames
        if not text.is_silence(reader.options):
            spans, num_done = split_window(text.tokens, reader.vocabulary, num_frames)
            segments = _segments(spans, seek, text, reader.vocabulary, recording, language)
        if not reader.options.condition_on_previous_text or text.temperature > HIGHEST_TEMPERATURE_TO_TRUST:
            said = []
        else:
            said += [token for segment in segments for token in segment.tokens]
        seek += num_done
        yield segments, seek


async def _all_at_once(reader: WindowReader, recording: Recording, language: str, prompt: list[int]) -> Windows:
    room = asyncio.Semaphore(MAX_WINDOWS)

    async def read(seek: int, num_frames: int) -> WindowText:
        async with room:
            return await reader.read(recording.window(seek), language, prompt, num_frames)

    starts = recording.starts()
    stops = [*starts[1:], _num_frames(recording)]
    tasks = [asyncio.create_task(read(seek, stop - seek)) for seek, stop in zip(starts, stops)]
    try:
        for seek, stop, task in zip(starts, stops, tasks):
            text = await task
            num_frames = stop - seek
            spans = [] if text.is_silence(reader.options) else [Span(0.0, num_frames / FRAMES_PER_SECOND, text.tokens)]
            yield _segments(spans, seek, text, reader.vocabulary, recording, language), seek + num_frames
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _num_frames(recording: Recording) -> int:
    """A recording shorter than a frame is one, too."""
    return max(recording.num_frames, 1)


def _segments(
    spans: list[Span],
    seek: int,
    text: WindowText,
    vocabulary: SpeechVocabulary,
    recording: Recording,
    language: str,
) -> list[Segment]:
    """Returns the segments of a window, without those that say nothing, or that lie after the recording's end."""
    offset = seek / FRAMES_PER_SECOND
    segments = []
    for span in spans:
        said = vocabulary.decode_text(span.tokens)
        start, end = offset + span.start, min(offset + span.end, recording.duration)
        if said.strip() and start < end:
            segments.append(
                Segment(
                    start=start,
                    end=end,
                    text=said,
                    tokens=span.tokens,
                    seek=seek,
                    temperature=text.temperature,
                    avg_logprob=text.avg_logprob,
                    compression_ratio=text.compression_ratio,
                    no_speech_prob=text.no_speech_prob,
                    words=_words(span, offset, (start, end), text.times, vocabulary, language),
                )
            )
    return segments


def _words(
    span: Span,
    offset: float,
    bounds: tuple[float, float],
    times: list[float] | None,  # of the window, as in WindowText
    vocabulary: SpeechVocabulary,
    language: str,
) -> list[Word] | None:
    """The words of a segment. Timestamps and other special tokens are no part of any."""
    if times is None:
        return None
    places = [place for place, token in enumerate(span.tokens) if token < vocabulary.end]
    if not places:
        return []
    first, last = places[0], places[-1]  # text lies between timestamps, in one run
    tokens = span.tokens[first : last + 1]
    ends = [offset + seconds for seconds in times[span.first + first : span.first + last + 2]]
    return find_words(tokens, ends, *bounds, language, vocabulary.decode_text)


def make_transcriber(
    source: ModelSource,
    tokenizer: Tokenizer,
    generate: Generate,
    max_model_len: int | None = None,  # of the engine; None: the model's
    limits: AudioLimits | None = None,
) -> Transcriber:
    """RequestError: the model does not read audio."""
    encoder = source.config.encoder
    if encoder is None or encoder.num_mel_bins is None:
        raise RequestError("model", "does not read audio", "a speech model, such as one of the Whisper family")
    if encoder.reads_waveform:
        plain = plain_vocabulary(tokenizer, source.config, max_model_len)
        return Transcriber(generate, plain, None, limits or AudioLimits())
    folder = Path(source.path)
    decoding = {**_config(folder), **_generation_config(folder)}  # the width of a filter is in the former
    vocabulary = find_vocabulary(tokenizer, source.config, decoding, max_model_len)
    return Transcriber(generate, vocabulary, encoder.num_mel_bins, limits or AudioLimits())


@lru_cache(maxsize=8)
def _generation_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "generation_config.json")


@lru_cache(maxsize=8)
def _config(folder: Path) -> dict[str, Any]:
    width = read_json(folder / "config.json").get("median_filter_width")
    return {} if width is None else {"median_filter_width": width}


def async_transcriber(
    llm: AsyncLLM,
    *,
    limits: AudioLimits | None = None,
    request_id: str | None = None,  # what the ids of its requests begin with
    **placement: Any,  # priority, cache_salt and owner, as AsyncLLM.generate takes them
) -> Transcriber:
    """Transcribes any number of recordings, at the same time or one after the other.

        async with AsyncLLM(model) as llm:
            transcription = await async_transcriber(llm).transcribe("talk.mp3", TranscriptionOptions())

    RequestError: the model does not read audio.
    """
    generate = AsyncGenerate(llm, request_id or f"transcribe-{secrets.token_hex(16)}", placement)
    return make_transcriber(llm.source, llm.get_tokenizer(), generate, llm.config.max_model_len, limits)


class AsyncGenerate:
    def __init__(self, llm: AsyncLLM, request_id: str, placement: dict[str, Any]) -> None:
        self._llm = llm
        self._request_id = request_id
        self._placement = placement
        self._numbers = itertools.count()

    async def __call__(
        self, features: np.ndarray, prompt_token_ids: list[int], params: GenerationParams
    ) -> RequestOutput:
        request_id = f"{self._request_id}-{next(self._numbers)}"
        prompt = window_prompt(features, prompt_token_ids)
        final: RequestOutput | None = None
        async with aclosing(self._llm.generate(prompt, params, request_id, **self._placement)) as outputs:
            async for output in outputs:
                final = output
        with suppress(UnknownParentError):  # a window is never continued, and it would hold its features
            await self._llm.forget(request_id, self._placement.get("owner"))
        return checked_output(final)

    async def cross_weights(self, features: np.ndarray, token_ids: list[int], params: HiddenStatesParams) -> np.ndarray:
        placement = {name: value for name, value in self._placement.items() if name != "priority"}
        prompt = window_prompt(features, token_ids)
        for pause in itertools.chain(PAUSES, itertools.repeat(PAUSES[-1])):
            request_id = f"{self._request_id}-{next(self._numbers)}"
            try:
                return checked_weights(await self._llm.extract_hidden_states(prompt, params, request_id, **placement))
            except QueueFullError:  # others hold what may be held of such numbers, for a moment
                await asyncio.sleep(pause)
        raise AssertionError("pauses do not end")
