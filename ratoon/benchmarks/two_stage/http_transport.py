"""The stages as requests to a server, and what is checked of the server first. What is sent is in http_client.py."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ratoon.api.options import status
from ratoon.api.remote.client import RefusedError, RemoteClient
from ratoon.api.remote.options import choose_model
from ratoon.benchmarks.loadgen.prompts import VOCABULARY, TokenPrompts
from ratoon.benchmarks.loadgen.run import arrival_times
from ratoon.benchmarks.loadgen.target import tokenize
from ratoon.benchmarks.two_stage.conversations import Conversation
from ratoon.benchmarks.two_stage.experiment import ConversationSource
from ratoon.benchmarks.two_stage.http_client import TwoStageClient
from ratoon.benchmarks.two_stage.settings import TwoStageSettings
from ratoon.benchmarks.two_stage.trips import Trip, Turn
from ratoon.benchmarks.two_stage.ways import HTTP_WAYS, Way
from ratoon.core.errors import RequestError

NO_SUCH_ENDPOINT = (404, 405)


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
