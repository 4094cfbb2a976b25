"""One window of a recording to its tokens and segments: the requests for it, further temperatures where a text is
rejected, and how much of the window was read. As openai-whisper does it.

The engine is behind `Generate`: its owner passes how to ask it. A text with timestamps looks like
<0.00> one <2.00><2.00> two <4.50>: what stands between two is a segment. The last one may break off where the window
ends. Then it is dropped, and the next window begins at the last end of a segment.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ratoon.core.errors import EngineError
from ratoon.core.outputs import CompletionOutput, HiddenStatesOutput, RequestOutput
from ratoon.core.params import (
    BeamSearchParams,
    GenerationParams,
    HiddenStatesParams,
    RequestOutputKind,
    SamplingParams,
)
from ratoon.engine.output.answers import arrange
from ratoon.models.log_mel import FRAMES_PER_SECOND, WINDOW_FRAMES
from ratoon.transcription.alignment import SECONDS_OF_POSITION, token_times
from ratoon.transcription.options import TranscriptionOptions
from ratoon.transcription.vocabulary import SECONDS_OF_TIMESTAMP, SpeechVocabulary


class Generate(Protocol):
    """An engine: features [mel bins, 3000] for its encoder and a decoder prompt in, the final output back.

    Raises RequestError or EngineError; cancellation aborts the request. Many may wait at a time.
    """

    async def cross_weights(self, features: np.ndarray, token_ids: list[int], params: HiddenStatesParams) -> np.ndarray:
        """The weights that these params ask for, of a decoder that reads all of these tokens: [heads, positions,
        encoder positions]."""
        ...

    async def __call__(
        self, features: np.ndarray, prompt_token_ids: list[int], params: GenerationParams
    ) -> RequestOutput: ...


@dataclass(slots=True)
class WindowText:
    tokens: list[int]  # timestamps among them, the end token not
    text: str
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None
    # Where words are asked for: the seconds from the window's beginning at which the first token begins, and those at
    # which each token ends
    times: list[float] | None = None

    def is_silence(self, options: TranscriptionOptions) -> bool:
        """Probably no speech, and what was made of it is improbable."""
        if options.no_speech_threshold is None or self.no_speech_prob is None:
            return False
        return self.no_speech_prob > options.no_speech_threshold and (
            options.logprob_threshold is None or self.avg_logprob <= options.logprob_threshold
        )

    def is_good(self, options: TranscriptionOptions) -> bool:
        """Neither repeats itself nor is improbable. Silence is good as it is: no temperature finds words in it."""
        highest_ratio, lowest_logprob = options.compression_ratio_threshold, options.logprob_threshold
        if lowest_logprob is not None and self.is_silence(options):
            return True
        if highest_ratio is not None and self.compression_ratio > highest_ratio:
            return False
        return lowest_logprob is None or self.avg_logprob >= lowest_logprob


@dataclass(frozen=True, slots=True)
class WindowReader:
    generate: Generate
    vocabulary: SpeechVocabulary
    options: TranscriptionOptions

    async def detect_language(self, features: np.ndarray) -> tuple[str, float]:
        """The likeliest language's code, and its probability."""
        languages = self.vocabulary.languages
        params = _one_token(list(languages.values()))
        choice = _choice(await self.generate(features, [self.vocabulary.start], params))
        token = choice.token_ids[0]
        code = next(code for code, token_id in languages.items() if token_id == token)
        return code, math.exp(_logprobs(choice)[0])

    async def read(
        self, features: np.ndarray, language: str, previous: list[int], num_frames: int = WINDOW_FRAMES
    ) -> WindowText:
        """The text of the first temperature that makes a good one, or of the last. `num_frames`: those of the window
        that are the recording's, and not padding."""
        reading = asyncio.create_task(self._no_speech_prob(features, previous))
        try:
            prompt = self.vocabulary.prompt(language, self.options.task, self.options.timestamps, previous)
            for temperature in self.options.temperatures:
                choice = _choice(await self.generate(features, prompt, self._params(temperature, num_frames)))
                text = self._judge(choice, temperature, await reading)
                if text.is_good(self.options):
                    break
            if self.options.word_timestamps and not text.is_silence(self.options):
                text.times = await self._times(features, prompt, text.tokens, num_frames)
            return text
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _no_speech_prob(self, features: np.ndarray, previous: list[int]) -> float | None:
        """The probability that at the start token the model says: no speech."""
        token = self.vocabulary.no_speech
        if token is None or self.options.no_speech_threshold is None:
            return None
        prompt = [*self.vocabulary.before_start(previous), self.vocabulary.start]
        choice = _choice(await self.generate(features, prompt, _one_token([token])))
        return math.exp(_logprobs(choice)[0])

    async def _times(self, features: np.ndarray, prompt: list[int], tokens: list[int], num_frames: int) -> list[float]:
        """See WindowText.times. The decoder runs once more over the finished text, whose keys and values it finds in
        the cache, as it does those of the recording. The way through the weights begins in the row of a timestamp, or,
        without timestamps, in that of the prompt's last token: the first token of text may end later."""
        if not tokens:
            return [0.0]
        heads = [list(head) for head in self.vocabulary.alignment_heads]
        num_before = 0 if self.options.timestamps else 1
        params = HiddenStatesParams(positions=[[len(prompt) - num_before, None]], cross_heads=heads)
        weights = await self.generate.cross_weights(features, [*prompt, *tokens], params)
        num_positions = num_frames // FRAMES_OF_POSITION
        times = await asyncio.to_thread(token_times, weights[..., :num_positions], self.vocabulary.median_width)
        return [0.0] * (1 - num_before) + times.tolist()

    def _params(self, temperature: float, num_frames: int) -> GenerationParams:
        """Rules of the model's files are applied by the engine."""
        rules = self.vocabulary.timestamp_rules if self.options.timestamps else None
        max_tokens = self.vocabulary.most_tokens_of(num_frames / FRAMES_PER_SECOND)
        if temperature == 0 and self.options.beam_size is not None:
            return BeamSearchParams(
                beam_width=self.options.beam_size, max_tokens=max_tokens, timestamps=rules, detokenize=False
            )
        return SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            timestamps=rules,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _judge(self, choice: CompletionOutput, temperature: float, no_speech_prob: float | None) -> WindowText:
        tokens = [token for token in choice.token_ids if token != self.vocabulary.end]
        text = self.vocabulary.decode_text(tokens).strip()
        return WindowText(
            tokens=tokens,
            text=text,
            temperature=temperature,
            avg_logprob=self._sum_of_logprobs(choice) / (len(tokens) + 1),
            compression_ratio=compression_ratio(text),
            no_speech_prob=no_speech_prob,
        )

    def _sum_of_logprobs(self, choice: CompletionOutput) -> float:
        """The engine's are those of the model, before rules forbid anything. Rules leave the first token of a text with
        timestamps hardly a choice, so what the model would rather have said there is no fault of the text."""
        if choice.logprobs is None:  # of beams there is only the sum
            return choice.cumulative_logprob or 0.0
        return sum(_logprobs(choice)[1 if self.options.timestamps else 0 :])


def compression_ratio(text: str) -> float:
    data = text.encode("utf-8")
    return len(data) / len(zlib.compress(data))


def _one_token(allowed: list[int]) -> SamplingParams:
    """The likeliest of these, with its probability among all tokens."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        allowed_token_ids=allowed,
        suppressed_token_ids=[],
        suppressed_first_token_ids=[],
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _choice(output: RequestOutput) -> CompletionOutput:
    return output.outputs[0]


def _logprobs(choice: CompletionOutput) -> list[float]:
    """The log-probabilities of the tokens that were chosen."""
    assert choice.logprobs is not None
    return [alternatives[token].logprob for token, alternatives in zip(choice.token_ids, choice.logprobs)]


def window_prompt(features: np.ndarray, prompt_token_ids: list[int]) -> dict[str, Any]:
    """Returns the prompt of a window as engines take it."""
    return {"encoder_prompt": {"features": features}, "decoder_prompt": {"prompt_token_ids": prompt_token_ids}}


def checked_weights(output: HiddenStatesOutput) -> np.ndarray:
    """The weights of a request that ended well."""
    if output.refusal is not None:
        raise output.refusal
    if output.error is not None or output.tensor is None:
        raise EngineError(output.error or "the engine gave no weights")
    arrange(output)
    weights: np.ndarray = output.tensor
    return weights


def checked_output(output: RequestOutput | None) -> RequestOutput:
    """The output of a request that ended well."""
    if output is None:
        raise EngineError("the engine gave no output")
    if output.refusal is not None:
        raise output.refusal
    if output.error is not None:
        raise EngineError(output.error)
    if any(choice.finish_reason == "abort" for choice in output.outputs):
        raise EngineError("the request was aborted")
    return output


FRAMES_OF_POSITION = round(SECONDS_OF_POSITION * FRAMES_PER_SECOND)
FRAMES_OF_TIMESTAMP = round(SECONDS_OF_TIMESTAMP * FRAMES_PER_SECOND)


class Span(NamedTuple):
    """A segment's place in a window, in seconds from there, and its tokens."""

    start: float
    end: float
    tokens: list[int]
    first: int = 0  # place of its first token in the window


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
        spans.append(Span(start, end, part, begin))
        begin = stop
    if ends_with_one:  # there is no speech after it
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
