"""Agents' traffic against one engine: sessions of many turns at once, with pauses for tools, and more keys and values
than the device holds. What tiers and the order of sessions are worth: hit rate, time to the first token, time in all.

    .venv/bin/python bench/agent_replay.py
    .venv/bin/python bench/agent_replay.py --random tiny --sessions 6 --turns 8
    python3 bench/agent_replay.py --shape llama3-8b --first 1000 --tool 200 --answer 32 --host 32GiB --vllm-path DIR

A session begins with a prompt of `--first` tokens. A turn generates `--answer` tokens, of which the next prompt leaves
out the first `--thought` (reasoning), waits for a tool, and adds `--tool` tokens of its result. The device's pool has
room for one part in `--oversubscribed` of what all sessions have at their ends; host memory has `--host` pools, and
files have the rest. Each way is run by the same requests in a new engine:

    device only, LRU       the prefix cache of the device, blocks go by least recent use
    device only, sessions  what only superseded texts need goes first
    tiers, LRU             host memory and files behind it
    tiers, sessions        both
    vllm                   the prefix cache of vLLM, with as many blocks (with --vllm-path)

All ways of Ratoon must give the same tokens, but for random weights on a GPU: there the most likely tokens are nearly
as likely as each other, and which is chosen depends on the batch. Each way has a process of its own, as vLLM has
packages of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workloads import PromptSource

GPU_SHAPES = Path(__file__).parent / "gpu" / "models"
BLOCK_SIZE = 16
VLLM = "vllm"
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


class Ratoon:
    """Ratoon's engine, with tiers and with names of sessions or without."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        from ratoon import AsyncLLM, SamplingParams

        tiers, self._named = WAYS[args.worker]
        settings: dict[str, Any] = common_settings(args) | {"num_blocks": num_blocks(args), "device": args.device}
        if tiers:
            settings |= {"kv_files": folder, "kv_files_size": args.files, "swap_memory": args.host}
        else:
            settings |= {"swap_memory": 0}
        if args.shape is not None:
            settings |= {"load_format": "dummy", "skip_tokenizer": True}
        self._params, self._llm = SamplingParams, AsyncLLM(args.model, **settings)

    async def answer(
        self, prompt: list[int], num_tokens: int, session: int, name: str
    ) -> AsyncIterator[tuple[list[int], int]]:
        """Yields the tokens so far, and how many of the prompt were found."""
        params = self._params(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        own = f"s{session}" if self._named else None
        async for output in self._llm.generate({"prompt_token_ids": prompt}, params, request_id=name, session=own):
            yield list(output.outputs[0].token_ids), output.num_cached_tokens or 0

    async def __aenter__(self) -> Ratoon:
        await self._llm.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._llm.shutdown()


class Peer:
    """vLLM's engine, with as many blocks on the device."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM

        self._params = SamplingParams
        settings: dict[str, Any] = common_settings(args) | {"num_gpu_blocks_override": num_blocks(args)}
        if args.shape is not None:
            settings |= {"load_format": "dummy", "skip_tokenizer_init": True}
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(args.model, enable_prefix_caching=True, disable_log_stats=True, **settings)
        )

    async def answer(
        self, prompt: list[int], num_tokens: int, session: int, name: str
    ) -> AsyncIterator[tuple[list[int], int]]:
        params = self._params(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        async for output in self._llm.generate({"prompt_token_ids": prompt}, params, request_id=name):
            yield list(output.outputs[0].token_ids), output.num_cached_tokens or 0

    async def __aenter__(self) -> Peer:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._llm.shutdown()


def common_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that both engines know by the same names."""
    return {
        "block_size": BLOCK_SIZE,
        "max_model_len": longest(args) + BLOCK_SIZE,
        "max_num_seqs": args.sessions,
        "max_num_batched_tokens": args.step_tokens,
    }


def num_blocks(args: argparse.Namespace) -> int:
    length = longest(args)
    return max(-(-length // BLOCK_SIZE) + 2, args.sessions * length // BLOCK_SIZE // args.oversubscribed)


def longest(args: argparse.Namespace) -> int:
    return args.first + args.turns * (args.answer - args.thought + args.tool) + args.answer


async def run_session(engine: Ratoon | Peer, args: argparse.Namespace, number: int, outcome: Outcome) -> None:
    source, pauses = PromptSource(number, args.vocabulary), random.Random(number)
    history = source.prompt(args.first)
    answers = []
    for turn in range(args.turns):
        begin, first = time.perf_counter(), None
        answer: list[int] = []
        found = 0
        async for tokens, num_found in engine.answer(history, args.answer, number, f"{number}-{turn}"):
            first = time.perf_counter() - begin if first is None else first
            answer, found = tokens, num_found
        assert first is not None and len(answer) == args.answer, f"an answer of {len(answer)} tokens"
        answers.append(answer)
        outcome.first_tokens.append(first)
        outcome.num_prompt_tokens += len(history)
        outcome.num_found_tokens += found
        history = [*history, *answer[args.thought :], *source.prompt(args.tool)]
        await asyncio.sleep(pauses.uniform(0.5, 1.5) * args.pause)
    outcome.answers += [[number, *answer] for answer in answers]


async def work(args: argparse.Namespace) -> None:
    """Runs one way, and prints its outcome. This is what the process of a way does."""
    with tempfile.TemporaryDirectory() as folder:
        async with (Peer if args.worker == VLLM else Ratoon)(args, folder) as engine:
            for count in (1, args.sessions):  # steps of one request and of many are compiled and captured
                source = PromptSource(1_000_000 + count, args.vocabulary)
                length = args.first // count
                await asyncio.gather(*(warm_up(engine, source.prompt(length), number) for number in range(count)))
            outcome, begin = Outcome(), time.perf_counter()
            await asyncio.gather(*(run_session(engine, args, one, outcome) for one in range(args.sessions)))
            outcome.seconds = time.perf_counter() - begin
    outcome.answers.sort(key=lambda answer: answer[0])
    args.outcome.write_text(json.dumps(asdict(outcome)), encoding="utf-8")


async def warm_up(engine: Ratoon | Peer, prompt: list[int], number: int) -> None:
    async for _ in engine.answer(prompt, 8, -1 - number, f"warm-{len(prompt)}-{number}"):
        pass


def run_way(args: argparse.Namespace, way: str) -> Outcome:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "outcome.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", way, "--outcome", str(path)]
        command += ["--model", args.model, "--vocabulary", str(args.vocabulary)]
        environment = dict(os.environ)
        if way == VLLM:
            environment["PYTHONPATH"] = str(args.vllm_path.resolve())
        subprocess.run(command, check=True, env=environment)
        return Outcome(**json.loads(path.read_text(encoding="utf-8")))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--random", metavar="SHAPE", help="random weights of a shape of random_models.py")
    parser.add_argument("--shape", help="a shape in gpu/models: random weights that the engine makes, on a GPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--first", type=int, default=96, help="tokens of the first prompt")
    parser.add_argument("--tool", type=int, default=24, help="tokens of a tool's result")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--thought", type=int, default=8, help="of these, those that the next prompt leaves out")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds that a tool takes, half as long to twice")
    parser.add_argument("--oversubscribed", type=int, default=5, help="the sessions' tokens, in pools of the device")
    parser.add_argument("--step-tokens", type=int, default=2048, help="tokens of a step at most")
    parser.add_argument("--host", default="1GiB", help="host memory, of ways with tiers")
    parser.add_argument("--files", default="16GiB", help="files, of ways with tiers")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, VLLM], help="default: all, vllm with --vllm-path")
    parser.add_argument("--vllm-path", type=Path, metavar="DIR", help="a folder with vLLM and what it needs, unpacked")
    parser.add_argument("--worker", choices=[*WAYS, VLLM], help=argparse.SUPPRESS)
    parser.add_argument("--outcome", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--vocabulary", type=int, default=49152, help=argparse.SUPPRESS)
    parser.add_argument(
        "--no-wait", action="store_true", help="accepted as by the other programs; nothing is waited for"
    )
    args = parser.parse_args()
    if args.ways is None:
        args.ways = [*WAYS, *([] if args.vllm_path is None else [VLLM])]
    if VLLM in args.ways and args.vllm_path is None:
        parser.error("--ways vllm needs --vllm-path")
    return args


def main() -> None:
    args = parse_arguments()
    if args.worker is not None:
        asyncio.run(work(args))
        return
    if args.random is not None:
        from random_models import SHAPES, make_random_model

        if args.random not in SHAPES:
            sys.exit(f"--random: {args.random}; expected {', '.join(sorted(SHAPES))}")
        args.vocabulary, args.model = SHAPES[args.random]["vocab_size"], str(make_random_model(args.random, ()).folder)
    elif args.shape is not None:
        args.model = str(GPU_SHAPES / args.shape)
    print(
        f"{args.sessions} sessions, {args.turns} turns, {longest(args)} tokens at the end; "
        f"1/{args.oversubscribed} of them fit on the device"
    )
    print("| way | hit rate | first token, median | 90 % | in all | against the first |")
    print("|---|---|---|---|---|---|")
    first: Outcome | None = None
    for way in args.ways:
        outcome = run_way(args, way)
        first = outcome if first is None else first
        must_agree = VLLM not in (way, args.ways[0]) and args.shape is None
        assert not must_agree or outcome.answers == first.answers, "the answers differ"
        median, late = statistics.median(outcome.first_tokens), statistics.quantiles(outcome.first_tokens, n=10)[-1]
        ratio = first.seconds / outcome.seconds
        times = f"{median * 1e3:.0f} ms | {late * 1e3:.0f} ms | {outcome.seconds:.1f} s | {ratio:.2f}×"
        print(f"| {way} | {outcome.hit_rate:.1%} | {times} |", flush=True)


if __name__ == "__main__":
    main()
