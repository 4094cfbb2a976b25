"""Sends sessions at their arrival times and records the answers. A whole run also detects what the server
supports, and warms it up. The figures are defined in measures.py.

It shares the machine with the server that it measures: while an answer runs, it only takes the time of each chunk.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any

import msgspec

from ratoon.api.options import status
from ratoon.api.remote.client import Chunk, RemoteClient, RemoteError, decode_chunk
from ratoon.api.remote.options import choose_model
from ratoon.api.terminal import request_progress
from ratoon.benchmarks.loadgen import datasets
from ratoon.benchmarks.loadgen.datasets import Session, Sources
from ratoon.benchmarks.loadgen.measures import RequestRecord
from ratoon.benchmarks.loadgen.settings import LoadSettings
from ratoon.benchmarks.loadgen.target import Target, examine, messages_of

OnEnd = Callable[[RequestRecord], None]


class Round(msgspec.Struct):
    records: list[RequestRecord]
    seconds: float
    interrupted: bool = False


class LoadRunner:
    """Runs rounds against one target. `concurrency` limits the sessions at once; None: no limit."""

    def __init__(
        self, client: RemoteClient, target: Target, concurrency: int | None = None, think_time: float = 0.0
    ) -> None:
        self._client = client
        self._target = target
        self._concurrency = concurrency
        self._think_time = think_time
        self._clock = Clock()

    async def run(self, sessions: Sequence[Session], arrivals: Sequence[float], on_end: OnEnd) -> Round:
        """Run all sessions. If cancelled, it stops running ones and returns the results so far."""
        records: list[RequestRecord] = []

        async def one(number: int, arrival: float) -> None:
            await self._run_session(number, sessions[number], arrival, records, on_end)

        self._clock = Clock()
        interrupted = await run_paced(one, arrivals, self._concurrency, self._clock)
        return Round(records, self._clock.now(), interrupted)

    async def _run_session(
        self, number: int, session: Session, arrival: float, records: list[RequestRecord], on_end: OnEnd
    ) -> None:
        history: list[dict[str, Any]] = []
        due = arrival
        for index, turn in enumerate(session):
            if index and self._think_time:
                await asyncio.sleep(self._think_time)
            if index or arrival == 0 or self._concurrency is not None:
                due = self._clock.now()  # no clock says when: it follows the end of something else, or the beginning
            record = RequestRecord(session=number, turn=index, scheduled=due)
            records.append(record)
            text: list[str] | None = [] if len(session) > 1 else None
            receive = partial(note, record, text=text)
            await send(self._client, self._target.path, self._target.body(turn, history), record, self._clock, receive)
            on_end(record)
            if record.error_kind is not None:
                return  # the rest of the conversation can't be sent
            if text is not None:
                history = [*history, *messages_of(turn), {"role": "assistant", "content": "".join(text)}]


def arrival_times(count: int, rate: float, burstiness: float, source: random.Random) -> list[float]:
    """Seconds from the beginning for each of `count` arrivals, `rate` a second on average; the first comes at once.

    Gaps are gamma distributed. Burstiness 1 is a Poisson process (as many independent users make it), lower comes in
    bursts, higher is more even. An infinite rate is all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += source.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times


class Clock:
    """Seconds from the beginning of a round."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def since_origin(self, moment: float) -> float:
        return moment - self._origin


async def run_paced(
    one: Callable[[int, float], Coroutine[Any, Any, None]],
    arrivals: Sequence[float],
    concurrency: int | None,
    clock: Clock,
) -> bool:
    """Run `one` for each arrival, by its number and moment, when it is due; no more than `concurrency` at once.
    Cancelled, it stops what is under way and returns True."""
    places: AbstractAsyncContextManager[Any] = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
    tasks: list[asyncio.Task[None]] = []

    async def in_place(number: int, arrival: float) -> None:
        async with places:
            await one(number, arrival)

    try:
        for number, arrival in enumerate(arrivals):
            delay = arrival - clock.now()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(in_place(number, arrival)))
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return True
    return False


async def send(
    client: RemoteClient,
    path: str,
    body: dict[str, Any],
    record: RequestRecord,
    clock: Clock,
    receive: Callable[[float, list[Chunk]], None],
    decode: Callable[[bytes], Chunk] = decode_chunk,
) -> None:
    """Run one request, successful or not."""
    record.started = clock.now()
    try:
        ended = await client.stream_timed(
            path, body, lambda moment, chunks: receive(clock.since_origin(moment), chunks), decode
        )
        record.ended = clock.since_origin(ended)
    except RemoteError as error:
        record.error_kind, record.error = error.kind, str(error)
        record.ended = clock.now()


def note(record: RequestRecord, now: float, chunks: list[Chunk], text: list[str] | None = None) -> None:
    """Write down what arrived. A chunk without a token count has one token, if it has text. The text is kept only where
    it is wanted."""
    for chunk in chunks:
        usage = chunk.usage
        for choice in chunk.choices:
            num_new = int(choice.has_text) if usage is None else usage.completion_tokens - record.num_output_tokens
            if num_new > 0:
                record.chunk_times.append(now)
                record.chunk_tokens.append(num_new)
                record.num_output_tokens += num_new
            if choice.finish_reason is not None:
                record.finish_reason = choice.finish_reason
            if text is not None:
                text.append(choice.new_text)
        if usage is not None:
            record.num_output_tokens = usage.completion_tokens
            record.num_prompt_tokens = usage.prompt_tokens
            record.num_cached_tokens = usage.cached_tokens


# ---- a whole run ----

MAKERS = {
    "random": datasets.random_sessions,
    "shared-prefix": datasets.shared_prefix_sessions,
    "multi-turn": datasets.multi_turn_sessions,
}


async def measure(client: RemoteClient, settings: LoadSettings, model: str | None) -> tuple[Target, list[Round]]:
    """Measures all rounds. If cancelled during a round, it returns the results so far."""
    has_file = settings.file_sessions is not None
    async with client:
        with status(f"asking {client.url}"):
            model = await choose_model(client, model)
            target = await examine(
                client, model, settings.chat, settings.ignore_eos, settings.fields, token_ids=not has_file
            )
            await warm_up(client, target, settings)
        return target, await run_rounds(client, target, settings)


async def warm_up(client: RemoteClient, target: Target, settings: LoadSettings) -> None:
    """Requests of the same form and other words. One that fails ends the run before anything is measured."""
    sessions = datasets.random_sessions(settings.shape, target.maker, Sources.of(settings.seed, "warm-up"))
    for session in sessions[: settings.num_warmup]:
        await client.stream(target.path, target.body(session[0], []), lambda chunks: None)


async def run_rounds(client: RemoteClient, target: Target, settings: LoadSettings) -> list[Round]:
    runner = LoadRunner(client, target, settings.concurrency, settings.think_time)
    rounds: list[Round] = []
    with request_progress(settings.repeat * settings.shape.num_requests, wanted=True) as advance:
        for number in range(settings.repeat):
            sessions = make_sessions(settings, target, number)
            source = random.Random(f"{settings.seed}, arrivals")  # all rounds have the same load
            arrivals = arrival_times(len(sessions), settings.request_rate, settings.burstiness, source)
            one = await runner.run(sessions, arrivals, lambda record: advance(1, record.num_output_tokens))
            rounds.append(one)
            if one.interrupted:
                break
    return rounds


def make_sessions(settings: LoadSettings, target: Target, number: int) -> list[Session]:
    """The sessions of a round."""
    if settings.file_sessions is not None:
        return settings.file_sessions
    # Runs of another shape get other words too, so that they do not find cached prompts of earlier ones.
    sources = Sources.of(settings.seed, f"{settings.dataset}, {settings.shape}, round {number}")
    return MAKERS[settings.dataset](settings.shape, target.maker, sources)
