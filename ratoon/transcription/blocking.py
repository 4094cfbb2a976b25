"""Transcription with an LLM: its engine runs a step at a time, in this process, while the call lasts.

Recordings are still many at a time. An event loop of its own carries them, and the engine steps whenever a window waits
for it; files are decoded on threads meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ratoon.core.errors import EngineDeadError, RatoonError
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import GenerationParams, HiddenStatesParams, RequestOutputKind
from ratoon.engine.front_end import with_output_kind
from ratoon.engine.llm_engine import LLMEngine
from ratoon.transcription.audio import Audio, recording_name
from ratoon.transcription.options import TranscriptionOptions
from ratoon.transcription.results import Follow, Transcription, audio_progress
from ratoon.transcription.transcriber import Transcriber
from ratoon.transcription.windows import checked_output, checked_weights, window_prompt

MAX_RECORDINGS = 32  # under way at a time: each is in memory as a spectrogram

T = TypeVar("T")
Inbox = deque[Any]  # of outputs


@dataclass(slots=True)
class SteppedEngine:
    """`Generate` for an engine that only runs while `step` is called."""

    # Begins a prompt's request, whose output goes to the inbox, and returns its id
    begin: Callable[[Any, GenerationParams | HiddenStatesParams, Inbox], str]
    step: Callable[[], object]
    end: Callable[[str], None]  # take a request back, or forget it
    _waiting: dict[str, tuple[Inbox, asyncio.Future[Any]]] = field(default_factory=dict)
    _asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(
        self, features: np.ndarray, prompt_token_ids: list[int], params: GenerationParams
    ) -> RequestOutput:
        return checked_output(await self._answer(window_prompt(features, prompt_token_ids), params))

    async def cross_weights(self, features: np.ndarray, token_ids: list[int], params: HiddenStatesParams) -> np.ndarray:
        return checked_weights(await self._answer(window_prompt(features, token_ids), params))

    async def _answer(self, prompt: dict[str, Any], params: GenerationParams | HiddenStatesParams) -> Any:
        inbox: Inbox = deque()
        request_id = self.begin(prompt, params, inbox)
        try:
            future = asyncio.get_running_loop().create_future()
            self._waiting[request_id] = (inbox, future)
            self._asked.set()
            return await future
        finally:
            self._waiting.pop(request_id, None)
            self.end(request_id)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Step the engine for as long as the work needs it."""
        stepping = asyncio.create_task(self._keep_stepping())
        try:
            return await work
        finally:
            stepping.cancel()
            await asyncio.gather(stepping, return_exceptions=True)

    async def _keep_stepping(self) -> None:
        while True:
            await self._asked.wait()
            error: Exception | None = None
            if not any(inbox for inbox, _ in self._waiting.values()):
                try:
                    self.step()
                except Exception as failure:  # passed to the waiting tasks
                    error = failure
            self._deliver(error)
            await asyncio.sleep(0)  # tasks with a result may send more requests before the next step

    def _deliver(self, error: Exception | None) -> None:
        for request_id, (inbox, future) in list(self._waiting.items()):
            if error is None and not inbox:
                continue
            del self._waiting[request_id]
            if future.done():  # given up
                continue
            if inbox:
                future.set_result(inbox.popleft())
            elif error is not None:
                future.set_exception(error)
        if not self._waiting:
            self._asked.clear()


def transcribe_blocking(
    engine: LLMEngine,
    make_transcriber: Callable[[SteppedEngine], Transcriber],
    audio: Audio | list[Audio],
    options: TranscriptionOptions,
    progress: bool,
) -> Transcription | list[Transcription]:
    """One recording, or a list of them, with an engine that nothing else uses meanwhile."""
    # Nothing continues the request of a window: its id only has to be another than those of other requests.
    ids = (f"transcribe-{number}" for number in itertools.count())

    def begin(prompt: Any, params: GenerationParams | HiddenStatesParams, inbox: Inbox) -> str:
        if isinstance(params, HiddenStatesParams):
            return engine.begin(engine.prepare_extraction(next(ids), prompt, params), inbox)
        params = with_output_kind(params, RequestOutputKind.FINAL_ONLY)
        return engine.begin(engine.prepare(next(ids), prompt, params), inbox)

    stepped = SteppedEngine(begin, engine.step, engine.end)
    transcriber = make_transcriber(stepped)
    single = not isinstance(audio, list)
    recordings: Sequence[Any] = [audio] if single else audio
    names = [recording_name(recording, index) for index, recording in enumerate(recordings)]
    with audio_progress(names, progress) as follow:
        found = run_blocking(lambda: stepped.run(transcribe_many(transcriber, recordings, options, follow, single)))
    return found[0] if single else found


async def transcribe_many(
    transcriber: Transcriber,
    recordings: Sequence[Audio],
    options: TranscriptionOptions,
    follow: Follow,
    single: bool = False,
) -> list[Transcription]:
    """Transcribes recordings, and returns results in their order. One that fails has `error` set, and the others go on;
    a single one raises."""
    transcriber.check(options)  # an error in them applies to all
    room = asyncio.Semaphore(MAX_RECORDINGS)

    async def transcribe(index: int, audio: Audio) -> Transcription:
        transcription = Transcription(options.task)
        try:
            async with room, aclosing(transcriber.follow(audio, options)) as news:
                async for progress in news:
                    transcription = progress.transcription
                    follow(index, progress)
        except EngineDeadError:
            raise
        except RatoonError as error:
            if single:
                raise
            transcription.error = str(error)
        return transcription

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(transcribe(index, audio)) for index, audio in enumerate(recordings)]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def run_blocking(make_work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs work on an event loop of its own; where one runs already on this thread (a notebook has one), on another
    thread."""

    def run() -> T:
        with asyncio.Runner() as runner:
            return runner.run(make_work())

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(run).result()
