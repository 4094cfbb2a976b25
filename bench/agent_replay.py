"""Agents' traffic against one engine: sessions of many turns at once, with pauses for tools, and more keys and values
than the device holds. What tiers and the order of sessions are worth: hit rate, time to the first token, time in all.

    .venv/bin/python bench/agent_replay.py
    .venv/bin/python bench/agent_replay.py --random tiny --sessions 6 --turns 8
    .venv/bin/python bench/agent_replay.py --model FOLDER --device cuda --first 2000 --tool 400 --answer 64 --thought 32

A session begins with a prompt of `--first` tokens. A turn generates `--answer` tokens, of which the next prompt leaves
out the first `--thought` (reasoning), waits for a tool, and adds `--tool` tokens of its result. The device's pool has
room for one part in `--oversubscribed` of what all sessions have at their ends; host memory has `--host` pools, and
files have the rest. Each way is run by the same requests in a new engine:

    device only, LRU       the prefix cache of the device, blocks go by least recent use
    device only, sessions  what only superseded texts need goes first
    tiers, LRU             host memory and files behind it
    tiers, sessions        both

All ways must give the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from random_models import SHAPES, make_random_model
from workloads import PromptSource

from ratoon import AsyncLLM, SamplingParams

BLOCK_SIZE = 16
WAYS = {
    "device only, LRU": (False, False),
    "device only, sessions": (False, True),
    "tiers, LRU": (True, False),
    "tiers, sessions": (True, True),
}


@dataclass
class Outcome:
    seconds: float = 0.0
    first_tokens: list[float] = field(default_factory=list)  # seconds of each turn
    num_prompt_tokens: int = 0
    num_found_tokens: int = 0
    answers: list[list[int]] = field(default_factory=list)  # of each turn of each session

    @property
    def hit_rate(self) -> float:
        return self.num_found_tokens / self.num_prompt_tokens


async def run_session(llm: AsyncLLM, args: argparse.Namespace, number: int, named: bool, outcome: Outcome) -> None:
    source, pauses = PromptSource(number, args.vocabulary), random.Random(number)
    history = source.prompt(args.first)
    params = SamplingParams(temperature=0, max_tokens=args.answer, ignore_eos=True)
    answers = []
    for turn in range(args.turns):
        begin, first, last = time.perf_counter(), None, None
        name = f"s{number}" if named else None
        async for output in llm.generate(
            {"prompt_token_ids": history}, params, request_id=f"{number}-{turn}", session=name
        ):
            first = time.perf_counter() - begin if first is None else first
            last = output
        assert first is not None and last is not None
        answer = list(last.outputs[0].token_ids)
        answers.append(answer)
        outcome.first_tokens.append(first)
        outcome.num_prompt_tokens += len(history)
        outcome.num_found_tokens += last.num_cached_tokens or 0
        history = [*history, *answer[args.thought :], *source.prompt(args.tool)]
        await asyncio.sleep(pauses.uniform(0.5, 1.5) * args.pause)
    outcome.answers += [[number, *answer] for answer in answers]


async def run_way(args: argparse.Namespace, tiers: bool, named: bool, folder: str) -> Outcome:
    length = longest(args)
    num_blocks = max(-(-length // BLOCK_SIZE) + 2, args.sessions * length // BLOCK_SIZE // args.oversubscribed)
    settings: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": BLOCK_SIZE,
        "max_model_len": length + BLOCK_SIZE,
    }
    if tiers:
        settings |= {"kv_files": folder, "kv_files_size": args.files, "swap_memory": args.host}
    else:
        settings |= {"swap_memory": 0}
    llm = AsyncLLM(args.model, device=args.device, max_num_seqs=args.sessions, **settings)
    async with llm:
        warm = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        async for _ in llm.generate({"prompt_token_ids": [5, 6, 7]}, warm, request_id="warm"):
            pass
        outcome, begin = Outcome(), time.perf_counter()
        await asyncio.gather(*(run_session(llm, args, one, named, outcome) for one in range(args.sessions)))
        outcome.seconds = time.perf_counter() - begin
    outcome.answers.sort(key=lambda answer: answer[0])
    return outcome


def longest(args: argparse.Namespace) -> int:
    return args.first + args.turns * (args.answer - args.thought + args.tool) + args.answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--random", choices=sorted(SHAPES), help="random weights of this shape, in place of --model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--first", type=int, default=96, help="tokens of the first prompt")
    parser.add_argument("--tool", type=int, default=24, help="tokens of a tool's result")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--thought", type=int, default=8, help="of these, those that the next prompt leaves out")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds that a tool takes, half as long to twice")
    parser.add_argument("--oversubscribed", type=int, default=5, help="the sessions' tokens, in pools of the device")
    parser.add_argument("--host", default="1GiB", help="host memory, of ways with tiers")
    parser.add_argument("--files", default="16GiB", help="files, of ways with tiers")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument(
        "--no-wait", action="store_true", help="accepted as by the other programs; nothing is waited for"
    )
    args = parser.parse_args()
    if args.random is not None:
        args.model = str(make_random_model(args.random, ()).folder)
    args.vocabulary = 49152 if args.random is None else SHAPES[args.random]["vocab_size"]
    print(
        f"{args.sessions} sessions, {args.turns} turns, {longest(args)} tokens at the end; "
        f"1/{args.oversubscribed} of them fit on the device"
    )
    print("| way | hit rate | first token, median | 90 % | in all | against the first |")
    print("|---|---|---|---|---|---|")
    outcomes: list[Outcome] = []
    for way in args.ways:
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(outcome := asyncio.run(run_way(args, *WAYS[way], folder)))
        assert outcome.answers == outcomes[0].answers, "the answers differ"
        median, late = statistics.median(outcome.first_tokens), statistics.quantiles(outcome.first_tokens, n=10)[-1]
        ratio = outcomes[0].seconds / outcome.seconds
        times = f"{median * 1e3:.0f} ms | {late * 1e3:.0f} ms | {outcome.seconds:.1f} s | {ratio:.2f}×"
        print(f"| {way} | {outcome.hit_rate:.1%} | {times} |", flush=True)


if __name__ == "__main__":
    main()
