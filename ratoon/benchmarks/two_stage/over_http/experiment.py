"""A whole run over HTTP: check the server, warm up, run the variants in turn in each round."""

from __future__ import annotations

import random
import secrets

import msgspec

from ratoon.api.options import status
from ratoon.api.progress import request_progress
from ratoon.api.remote.client import RefusedError, RemoteClient
from ratoon.api.remote.options import choose_model
from ratoon.benchmarks.loadgen.datasets import Turn as FirstTurn
from ratoon.benchmarks.loadgen.prompts import VOCABULARY, TokenPrompts
from ratoon.benchmarks.loadgen.run import arrival_times
from ratoon.benchmarks.loadgen.target import tokenize
from ratoon.benchmarks.two_stage.over_http.conversations import Conversation, random_conversations
from ratoon.benchmarks.two_stage.over_http.run import Trip, Turn, TwoStageClient
from ratoon.benchmarks.two_stage.over_http.settings import HttpSettings
from ratoon.benchmarks.two_stage.ways import HTTP_WAYS
from ratoon.core.errors import EngineError, RequestError

WARM_UP_TOKENS = 4
NO_SUCH_ENDPOINT = (404, 405)

Round = dict[str, Turn]  # by the way's key


class Measured(msgspec.Struct):
    model: str
    conversations: list[list[Conversation]]  # of each round
    rounds: list[Round]  # the last may be cut off

    @property
    def interrupted(self) -> bool:
        return any(turn.interrupted for one in self.rounds for turn in one.values())


async def measure(client: RemoteClient, settings: HttpSettings, model: str | None) -> Measured:
    """If cancelled during a round, it returns the results so far."""
    async with client:
        with status(f"asking {client.url}"):
            model = await find_model(client, model)
            await check_server(client)
            maker = TokenPrompts(await tokens_of(client, model, VOCABULARY))
            from_file = await prepare_file(client, model, settings)
            runner = TwoStageClient(client, model, settings, secrets.token_hex(4))
            await warm_up(runner, settings, maker, from_file)
        return await run_rounds(runner, settings, maker, from_file, model)


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


async def prepare_file(client: RemoteClient, model: str, settings: HttpSettings) -> list[Conversation] | None:
    """Suffixes become token ids, so that all ways send the same sequence."""
    if settings.file_conversations is None:
        return None
    seeds = random.Random(f"{settings.sizes.seed}, answers")
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


async def warm_up(
    runner: TwoStageClient, settings: HttpSettings, maker: TokenPrompts, from_file: list[Conversation] | None
) -> None:
    """Each way once, with a short answer. One that fails ends the run before anything is measured."""
    source = random.Random(f"{settings.sizes.seed}, warm-up")
    (conversation,) = (from_file or random_conversations(settings.sizes, 1, maker, source))[:1]
    turn = conversation.turn
    short = FirstTurn(output_len=min(WARM_UP_TOKENS, turn.output_len), prompt=turn.prompt, messages=turn.messages)
    conversation = Conversation(short, conversation.suffix, conversation.seed)
    for way in HTTP_WAYS:
        (trip,) = (await runner.take_turn(way, [conversation], [0.0], "warm-up")).trips.values()
        if not trip.succeeded:
            failed = trip.stage1 if trip.stage2 is None else trip.stage2
            where = f"{way.label}, stage {failed.turn + 1}"
            if (failed.error_kind or "").startswith("HTTP 4"):
                raise RequestError(where, failed.error or "refused")
            raise EngineError(f"{where}: {failed.error}")


async def run_rounds(
    runner: TwoStageClient,
    settings: HttpSettings,
    maker: TokenPrompts,
    from_file: list[Conversation] | None,
    model: str,
) -> Measured:
    """Conversations are new in each round, unless they come from a file, and another way goes first."""
    sizes, count = settings.sizes, settings.num_conversations
    measured = Measured(model, [], [])
    with request_progress(sizes.rounds * len(HTTP_WAYS) * count, wanted=True, label="two-stage") as advance:

        def on_end(trip: Trip) -> None:
            advance(1, len(trip.answer))

        for number in range(sizes.rounds):
            source = random.Random(f"{sizes.seed}, round {number}")
            conversations = from_file or random_conversations(sizes, count, maker, source)
            arrivals = arrival_times(
                count, settings.request_rate, settings.burstiness, random.Random(f"{sizes.seed}, arrivals")
            )
            measured.conversations.append(conversations)
            one: Round = {}
            measured.rounds.append(one)
            for offset in range(len(HTTP_WAYS)):
                way = HTTP_WAYS[(number + offset) % len(HTTP_WAYS)]
                one[way.key] = await runner.take_turn(way, conversations, arrivals, str(number), on_end)
                if one[way.key].interrupted:
                    return measured
    return measured
