"""The stages as requests to a server, and what is checked of the server first. Each stage 2 is sent as soon as its
stage 1 has ended.

What a way reuses is decided by what is sent: a salt of its own for every request (nothing), the whole sequence again
under one salt (the prefix cache), or the suffix alone behind a leased answer (a continuation).
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from ratoon.api.options import status
from ratoon.api.remote.client import CHAT, COMPLETIONS, Chunk, ChunkChoice, RefusedError, RemoteClient
from ratoon.api.remote.options import choose_model
from ratoon.benchmarks.loadgen.datasets import VOCABULARY, TokenPrompts
from ratoon.benchmarks.loadgen.measures import RequestRecord
from ratoon.benchmarks.loadgen.run import Clock, arrival_times, note, run_paced, send
from ratoon.benchmarks.loadgen.target import messages_of, tokenize
from ratoon.benchmarks.two_stage.conversations import Conversation
from ratoon.benchmarks.two_stage.experiment import ConversationSource
from ratoon.benchmarks.two_stage.settings import TwoStageSettings
from ratoon.benchmarks.two_stage.trips import HTTP_WAYS, NO_REUSE, Beam, Trip, Turn, Way
from ratoon.core.errors import RequestError
from ratoon.core.prepared import prepared

NO_SUCH_ENDPOINT = (404, 405)


LEASE_SECONDS = 60.0  # from the end of stage 1; stage 2 follows at once
BAD_ANSWER = "bad answer"


class Beginning(msgspec.Struct, gc=False):
    source: str


class StageChoice(ChunkChoice, gc=False):
    """A choice of a chunk, with the extensions of Ratoon's server."""

    index: int = 0
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None  # of a completion
    best_so_far: str | None = None
    score: float | None = None


class StageChunk(Chunk, gc=False):
    choices: list[StageChoice] = msgspec.field(default_factory=list)  # type: ignore[assignment]
    id: str = ""
    prompt_token_ids: list[int] | None = None  # of a chat
    continuation: Beginning | None = None


decode_stage_chunk = msgspec.json.Decoder(prepared(StageChunk)).decode


class Completion:
    """One stage's, put together from its chunks."""

    def __init__(self) -> None:
        self.id = ""
        self.prompt_token_ids: list[int] = []
        self.token_ids: dict[int, list[int]] = {}  # by choice
        self.texts: dict[int, str] = {}
        self.scores: dict[int, float] = {}
        self.source: str | None = None  # of a continuation

    def take(self, record: RequestRecord, now: float, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            assert isinstance(chunk, StageChunk)
            self.id = chunk.id or self.id
            self.source = self.source if chunk.continuation is None else chunk.continuation.source
            self.prompt_token_ids = chunk.prompt_token_ids or self.prompt_token_ids
            for choice in chunk.choices:
                self._take_choice(choice)
                if choice.best_so_far is not None and not record.chunk_times:  # a search has its first result
                    record.chunk_times.append(now)
                    record.chunk_tokens.append(0)
        note(record, now, list(chunks))

    def _take_choice(self, choice: StageChoice) -> None:
        self.prompt_token_ids = choice.prompt_token_ids or self.prompt_token_ids
        self.token_ids.setdefault(choice.index, []).extend(choice.token_ids or ())
        self.texts[choice.index] = self.texts.get(choice.index, "") + choice.new_text
        if choice.finish_reason is not None and choice.score is not None:
            self.scores[choice.index] = choice.score

    def beams(self) -> list[Beam]:
        return [Beam(tuple(self.token_ids[index]), score) for index, score in sorted(self.scores.items())]

    def beam_texts(self) -> list[str]:
        return [self.texts[index] for index in sorted(self.scores)]


class TwoStageClient:
    def __init__(self, client: RemoteClient, model: str, settings: TwoStageSettings, run_id: str) -> None:
        self._client = client
        self._model = model
        self._settings = settings
        self._run_id = run_id  # of this run alone: nothing that an earlier one left in the cache is found

    async def take_turn(
        self,
        way: Way,
        conversations: Sequence[Conversation],
        arrivals: Sequence[float],
        occasion: str,
        on_end: Callable[[Trip], None] = lambda trip: None,
    ) -> Turn:
        """Runs both stages of all conversations in one way. If cancelled, it returns the results so far."""
        trips: dict[int, Trip] = {}
        clock = Clock()
        by_rate = any(arrivals)

        async def one(index: int, arrival: float) -> None:
            due = arrival if by_rate and self._settings.concurrency is None else clock.now()
            trip = trips[index] = Trip(RequestRecord(session=index, turn=0, scheduled=due))
            await self._run(trip, way, conversations[index], f"{self._run_id}-{occasion}-{way.key}-{index}", clock)
            on_end(trip)

        interrupted = await run_paced(one, arrivals, self._settings.concurrency, clock)
        return Turn(dict(sorted(trips.items())), clock.now(), interrupted)

    async def _run(self, trip: Trip, way: Way, conversation: Conversation, name: str, clock: Clock) -> None:
        # The same salt for all conversations of a way, as a server without salts would have it.
        salts = (f"{name}-1", f"{name}-2") if way is NO_REUSE else (name.rpartition("-")[0],) * 2
        first = Completion()
        path, body = self._first(way, conversation, salts[0])
        await send(self._client, path, body, trip.stage1, clock, self._receiver(first, trip.stage1), decode_stage_chunk)
        trip.answer = first.token_ids.get(0, [])
        if trip.stage1.succeeded and not (first.prompt_token_ids and trip.answer):
            trip.stage1.error_kind = BAD_ANSWER
            trip.stage1.error = "the answer has no token ids: the server ignores return_token_ids"
        if not trip.stage1.succeeded:
            return
        record = trip.stage2 = RequestRecord(session=trip.stage1.session, turn=1, scheduled=clock.now())
        second = Completion()
        body = self._second(way, conversation, first, salts[1])
        await send(self._client, COMPLETIONS, body, record, clock, self._receiver(second, record), decode_stage_chunk)
        if record.succeeded and not second.scores:
            record.error_kind, record.error = BAD_ANSWER, "the answer has no beams: the server ignores use_beam_search"
        if not record.succeeded:
            return
        trip.beams, trip.texts = second.beams(), second.beam_texts()
        trip.source = second.source or ("prefix_cache" if record.num_cached_tokens else "recomputed")

    @staticmethod
    def _receiver(answer: Completion, record: RequestRecord) -> Callable[[float, list[Chunk]], None]:
        return lambda now, chunks: answer.take(record, now, chunks)

    def _first(self, way: Way, conversation: Conversation, salt: str) -> tuple[str, dict[str, Any]]:
        turn = conversation.turn
        body = {
            **self._common(salt),
            "max_tokens": turn.output_len,
            "temperature": 1.0,
            "seed": conversation.seed,
        }
        if way.continues:
            body["retain_kv"] = LEASE_SECONDS
        if turn.messages is not None:
            return CHAT, {**body, "messages": messages_of(turn)}
        return COMPLETIONS, {**body, "prompt": turn.prompt}

    def _second(self, way: Way, conversation: Conversation, first: Completion, salt: str) -> dict[str, Any]:
        body = {
            **self._common(salt),
            "use_beam_search": True,
            "beam_width": self._settings.beam_width,
            "n": self._settings.beam_width,
            "max_tokens": self._settings.beam_tokens,
        }
        if way.continues:
            return {
                **body,
                "prompt": "",
                "continuation_of": first.id,
                "continuation_suffix": conversation.suffix,
            }
        return {**body, "prompt": first.prompt_token_ids + first.token_ids[0] + conversation.suffix}

    def _common(self, salt: str) -> dict[str, Any]:
        return {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
            "ignore_eos": self._settings.ignore_eos,
            "cache_salt": salt,
        }


class HttpTransport:
    ways = HTTP_WAYS

    def __init__(
        self, runner: asyncio.Runner, client: RemoteClient, settings: TwoStageSettings, model: str | None
    ) -> None:
        """Asks the server what it has."""
        self._runner = runner
        self._settings = settings
        self.model, self.source = runner.run(self._prepare(client, model))
        self._stages = TwoStageClient(client, self.model, settings, secrets.token_hex(4))

    async def _prepare(self, client: RemoteClient, asked: str | None) -> tuple[str, ConversationSource]:
        model = await find_model(client, asked)
        await check_server(client)
        maker = TokenPrompts(await tokens_of(client, model, VOCABULARY))
        return model, ConversationSource(self._settings, maker, await prepare_file(client, model, self._settings))

    def take_turn(
        self, way: Way, conversations: Sequence[Conversation], occasion: str, on_end: Callable[[Trip], None]
    ) -> Turn:
        settings, source = self._settings, random.Random(f"{self._settings.seed}, arrivals")
        arrivals = arrival_times(len(conversations), settings.request_rate, settings.burstiness, source)
        return self._runner.run(self._stages.take_turn(way, conversations, arrivals, occasion, on_end))


@contextmanager
def open_transport(
    client: RemoteClient, settings: TwoStageSettings, model: str | None, loop_factory: Any
) -> Iterator[HttpTransport]:
    """Opens a transport on an event loop of its own. `asyncio.Runner` turns Ctrl-C into a cancellation of the turn that
    runs."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(client.__aenter__())
        try:
            with status(f"asking {client.url}"):
                transport = HttpTransport(runner, client, settings, model)
            yield transport
        finally:
            runner.run(client.__aexit__(None, None, None))


async def find_model(client: RemoteClient, asked: str | None) -> str:
    name = await choose_model(client, asked)
    if asked is not None and asked not in (served := await client.models()):
        names = ", ".join(map(repr, served)) or "none"
        raise RequestError("--model", f"the server has no model {asked!r}", f"one of those that it has: {names}")
    return name


async def check_server(client: RemoteClient) -> None:
    """RequestError for a server that has no continuations."""
    try:
        answer = await client.get("/v1/requests?limit=1")
        known = isinstance(answer, dict) and answer.get("object") == "list" and "has_more" in answer
    except RefusedError as error:
        if error.status not in NO_SUCH_ENDPOINT:
            raise
        known = False
    if not known:
        raise RequestError(
            "--url",
            f"{client.url} can't continue answers: it is not a Ratoon server",
            "one that `ratoon serve` started",
        )


async def tokens_of(client: RemoteClient, model: str, text: str) -> list[int]:
    token_ids = await tokenize(client, model, text)
    if token_ids is None:
        raise RequestError("--url", f"{client.url} has no /tokenize", "a Ratoon server with a tokenizer")
    return token_ids


async def prepare_file(client: RemoteClient, model: str, settings: TwoStageSettings) -> list[Conversation] | None:
    """Suffixes become token ids, so that all ways send the same sequence."""
    if settings.file_conversations is None:
        return None
    seeds = random.Random(f"{settings.seed}, answers")
    known: dict[str, list[int]] = {"": []}
    prepared = []
    for line in settings.file_conversations:
        suffix = line.suffix
        if isinstance(suffix, str):
            if suffix not in known:
                known[suffix] = await tokens_of(client, model, suffix)
            suffix = known[suffix]
        prepared.append(Conversation(line.turn, suffix, seeds.getrandbits(31), line.references))
    return prepared
