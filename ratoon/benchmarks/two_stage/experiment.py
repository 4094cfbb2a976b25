"""A whole run: warm up, then in each round all ways with the same conversations.

The stages are sent by a transport: to an engine in this process (in_process.py), or to a server (http_transport.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ratoon.api.terminal import request_progress
from ratoon.benchmarks.loadgen.datasets import PromptMaker
from ratoon.benchmarks.loadgen.datasets import Turn as FirstTurn
from ratoon.benchmarks.two_stage.conversations import Conversation
from ratoon.benchmarks.two_stage.settings import TwoStageSettings
from ratoon.benchmarks.two_stage.trips import HTTP_WAYS, Measured, Round, Trip, Turn, Way
from ratoon.core.errors import EngineError, RequestError

WARM_UP_TOKENS = 4


class Transport(Protocol):
    @property
    def ways(self) -> Sequence[Way]:
        """The ways that it can run."""
        ...

    def take_turn(
        self, way: Way, conversations: Sequence[Conversation], occasion: str, on_end: Callable[[Trip], None]
    ) -> Turn:
        """Runs both stages of conversations in one way. What another way left behind is not found; `occasion` is
        another one for every call with the same way."""
        ...


class ConversationSource:
    """The conversations of a run: new random ones for every round, or those of a file again."""

    def __init__(
        self, settings: TwoStageSettings, maker: PromptMaker, from_file: list[Conversation] | None = None
    ) -> None:
        self._settings = settings
        self._maker = maker
        self._from_file = from_file

    def take(self, count: int, occasion: str) -> list[Conversation]:
        if self._from_file is not None:
            return self._from_file[:count]
        source = random.Random(f"{self._settings.seed}, {occasion}")
        return [self._make(source) for _ in range(count)]

    def _make(self, source: random.Random) -> Conversation:
        settings = self._settings
        suffix: Any = self._maker.make(settings.suffix_tokens, source) if settings.suffix_tokens else []
        turn = FirstTurn(output_len=settings.stage1_tokens, prompt=self._maker.make(settings.prompt_tokens, source))
        return Conversation(turn, suffix, source.getrandbits(31))


def measure(transport: Transport, settings: TwoStageSettings, source: ConversationSource) -> Measured:
    warm_up(transport, source)
    return run_rounds(transport, settings, source)


def warm_up(transport: Transport, source: ConversationSource) -> None:
    """Runs each way once, with a short answer. One that fails ends the run before anything is measured."""
    (conversation,) = source.take(1, "warm-up")
    turn = conversation.turn
    short = FirstTurn(output_len=min(WARM_UP_TOKENS, turn.output_len), prompt=turn.prompt, messages=turn.messages)
    conversation = Conversation(short, conversation.suffix, conversation.seed)
    for way in HTTP_WAYS:
        (trip,) = transport.take_turn(way, [conversation], "warm-up", lambda trip: None).trips.values()
        if not trip.succeeded:
            failed = trip.stage1 if trip.stage2 is None else trip.stage2
            where = f"{way.label}, stage {failed.turn + 1}"
            if (failed.error_kind or "").startswith("HTTP 4"):
                raise RequestError(where, failed.error or "refused")
            raise EngineError(f"{where}: {failed.error}")


def run_rounds(transport: Transport, settings: TwoStageSettings, source: ConversationSource) -> Measured:
    """The ways take turns, and another one goes first in each round. Interrupted, it returns the results so far."""
    count, ways = settings.num_conversations, transport.ways
    measured = Measured([], [])
    with request_progress(settings.rounds * len(ways) * count, wanted=True, label="two-stage") as advance:
        for number in range(settings.rounds):
            conversations = source.take(count, f"round {number}")
            turns: Round = {}
            measured.conversations.append(conversations)
            measured.rounds.append(turns)
            for offset in range(len(ways)):
                way = ways[(number + offset) % len(ways)]
                turns[way.key] = transport.take_turn(
                    way, conversations, str(number), lambda trip: advance(1, len(trip.answer))
                )
                if turns[way.key].interrupted:
                    return measured
    return measured
