"""Conversations over two replicas: do their turns still find their prefixes, and is the work shared out?

    .venv/bin/python bench/replicas.py --json replicas.json
    .venv/bin/python bench/replicas.py --stub            # no model: shows where requests go, and nothing about speed

Each turn's prompt is the last one, its answer and some new tokens. The load balancer is compared with engines that take
turns and with a single engine, which is as good as it gets.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from export_hf import MODEL
from harness import Program, align, count, say
from peers.process import BENCH_FOLDER
from service.server import STUB
from stub_executor import STEP_SECONDS_VARIABLE
from workloads import PromptSource

from ratoon import AsyncLLM, RequestOutputKind, SamplingParams
from ratoon.core.request import EngineCoreOutputs
from ratoon.core.settings import engine_config
from ratoon.engine.processes.async_client import AsyncMPClient, make_async_client
from ratoon.observe.startup import StartupTimer

SEED = 1


@dataclass(frozen=True)
class Way:
    """How requests find an engine."""

    label: str
    num_replicas: int
    balanced: bool


@dataclass
class Result:
    num_prompt_tokens: int  # of later turns, whose beginning an engine has seen
    num_cached_tokens: int
    requests_by_replica: list[int]
    replicas_by_session: float  # on average
    seconds: float

    @property
    def hit_rate(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens


class Places:
    """Notes which engine answered which request, as outputs pass by."""

    def __init__(self, client: AsyncMPClient) -> None:
        self.by_request: dict[str, int] = {}
        take = client.get_outputs

        async def get_outputs() -> list[EngineCoreOutputs]:
            steps = await take()
            for outputs in steps:
                for output in outputs.outputs:
                    self.by_request[output.request_id] = outputs.engine_index
            return steps

        client.get_outputs = get_outputs  # type: ignore[method-assign]

    def of(self, request_id: str) -> int:
        """Inside the engine, ids have an ending of their own."""
        return next(place for inner, place in self.by_request.items() if inner.startswith(request_id))


async def run(way: Way, args: argparse.Namespace) -> Result:
    settings: dict[str, Any] = {"executor": STUB} if args.stub else {"kv_memory": args.kv_memory}
    timer = StartupTimer()
    client = make_async_client(engine_config(MODEL, **settings), way.num_replicas, timer, balanced=way.balanced)
    places = Places(client)
    llm = AsyncLLM(MODEL, client=client, skip_tokenizer=True, startup_timer=timer, **settings)
    prompts = PromptSource(SEED)
    sessions = [[prompts.prompt(args.turn_tokens) for _ in range(args.turns)] for _ in range(args.sessions)]
    async with llm:
        begin = time.monotonic()
        talks = (converse(llm, index, turns, args) for index, turns in enumerate(sessions))
        cached = [count for counts in await asyncio.gather(*talks) for count in counts]
        seconds = time.monotonic() - begin
    homes = [[places.of(name_of(session, turn)) for turn in range(args.turns)] for session in range(args.sessions)]
    requests = Counter(place for home in homes for place in home)
    return Result(
        num_prompt_tokens=sum(total for total, _ in cached),
        num_cached_tokens=sum(found for _, found in cached),
        requests_by_replica=[requests[index] for index in range(way.num_replicas)],
        replicas_by_session=sum(len(set(home)) for home in homes) / len(homes),
        seconds=seconds,
    )


async def converse(
    llm: AsyncLLM, session: int, turns: list[list[int]], args: argparse.Namespace
) -> list[tuple[int, int]]:
    """Prompt tokens and how many of them were cached, for each turn but the first."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=args.answer_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    thinking = random.Random(f"{SEED}, {session}")
    said: list[int] = []
    counts = []
    for index, turn in enumerate(turns):
        await asyncio.sleep(thinking.expovariate(1.0 / args.think_seconds))
        said += turn
        async for output in llm.generate({"prompt_token_ids": said}, params, name_of(session, index)):
            if index:
                counts.append((len(said), output.num_cached_tokens or 0))
            said = said + list(output.outputs[0].token_ids)
    return counts


def name_of(session: int, turn: int) -> str:
    return f"session{session:05}-turn{turn:05}"


class Replicas(Program):
    doc = __doc__
    rounds = None
    threads = False

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--stub", action="store_true", help="an executor without a model")
        count(parser, "--replicas", 2)
        count(parser, "--sessions", 25)
        count(parser, "--turns", 6)
        count(parser, "--turn-tokens", 64, "new ones")
        count(parser, "--answer-tokens", 32)
        parser.add_argument("--think-seconds", type=float, default=0.2, metavar="X", help="on average; %(default)s")
        parser.add_argument("--step-seconds", type=float, default=0.01, metavar="X", help="of the stub; %(default)s")
        parser.add_argument("--kv-memory", default="512MiB", metavar="SIZE", help="of each engine; %(default)s")

    def check_options(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        for option in ("replicas", "turns"):
            if getattr(args, option) < 2:
                parser.error(f"--{option}: {getattr(args, option)}; expected at least 2")
        if args.think_seconds <= 0:
            parser.error(f"--think-seconds: {args.think_seconds}; expected more than 0")

    def measure(self) -> None:
        os.environ["PYTHONPATH"] = str(BENCH_FOLDER.parent)  # where engine processes find bench.stub_executor
        os.environ[STEP_SECONDS_VARIABLE] = str(self.args.step_seconds)
        num = self.args.replicas
        for way in (
            Way("one engine", 1, True),
            Way(f"{num}, balanced", num, True),
            Way(f"{num}, taking turns", num, False),
        ):
            say(way.label)
            self.found[way.label] = asyncio.run(run(way, self.args))

    def title(self) -> str:
        what = "stub executor" if self.args.stub else MODEL
        return f"{what}; {self.args.sessions} conversations of {self.args.turns} turns"

    def report(self) -> Iterator[str]:
        args = self.args
        yield f"a turn: {args.turn_tokens} new tokens, {args.answer_tokens} answered, {args.think_seconds} s in between"
        rows = [["", "prefix hits", "requests", "replicas a conversation", "seconds"]]
        for label, result in self.found.items():
            requests = " + ".join(map(str, result.requests_by_replica))
            cells = [f"{result.hit_rate:.1%}", requests, f"{result.replicas_by_session:.2f}", f"{result.seconds:.1f}"]
            rows.append([label, *cells])
        yield align(rows)
        yield "Prefix hits: the share of prompt tokens, after each conversation's first turn, that was not computed."

    def figures(self) -> dict[str, Any]:
        return {"results": {name: {**asdict(one), "hit_rate": one.hit_rate} for name, one in self.found.items()}}


if __name__ == "__main__":
    sys.exit(Replicas().run())
