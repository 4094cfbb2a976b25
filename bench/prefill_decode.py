"""Measures how prompts hold up running streams: the time between their tokens while long prompts arrive, with one
engine, and with prompts computed by another engine than answers, on the same cores.

    .venv/bin/python bench/prefill_decode.py
    python3 bench/prefill_decode.py --shape llama3-8b --device cuda --tokens 8000 --interval 0.5 --prompts 20

Some streams run all the time. Long prompts come at fixed times and ask for a few tokens each. Rounds alternate between
the ways. Figures are those of the streams, the time from one token to the next, and those of the prompts, the time to
the first token. A second way with one engine takes prompts in small parts, which is the other remedy: it delays prompts
more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers.machine import describe_machine, wait_for_quiet_machine
from workloads import PromptSource

from ratoon import AsyncLLM, RequestOutputKind, SamplingParams

GPU_SHAPES = Path(__file__).parent / "gpu" / "models"
AIM = 0.5  # of the 99th percentile of one engine
QUIET_SECONDS = 600
SMALL_PART = 256  # tokens of a step, of the second way with one engine


@dataclass
class Figures:
    gaps: list[float] = field(default_factory=list)  # seconds from token to token of the streams
    first_tokens: list[float] = field(default_factory=list)  # of the long prompts
    num_tokens: int = 0  # of the streams
    seconds: float = 0.0


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def run_stream(llm: AsyncLLM, prompt: list[int], figures: Figures, is_over: asyncio.Event) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    last = None
    async for output in llm.generate(prompt, params):
        now = time.perf_counter()
        if last is not None:
            figures.gaps.append(now - last)
        last = now
        figures.num_tokens += len(output.outputs[0].token_ids)
        if is_over.is_set():
            return


async def ask_long(llm: AsyncLLM, prompt: list[int], num_tokens: int, figures: Figures) -> None:
    begin = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    is_first = True
    async for output in llm.generate(prompt, params):
        assert output.error is None, output.error
        if is_first:
            figures.first_tokens.append(time.perf_counter() - begin)
            is_first = False


async def measure(args: argparse.Namespace, settings: dict[str, Any], source: PromptSource, figures: Figures) -> None:
    room = args.tokens + args.prompts * int(args.interval * 400) + 4096
    settings = settings | {"device": args.device, "max_model_len": min(room, args.max_model_len)}
    if args.shape is not None:
        settings |= {"load_format": "dummy", "skip_tokenizer": True}
    async with AsyncLLM(args.model, **settings) as llm:
        await ask_long(llm, source.prompt(64), 4, Figures())
        await ask_long(llm, source.prompt(args.tokens), 2, Figures())  # kernels are chosen
        is_over = asyncio.Event()
        streams = [
            asyncio.create_task(run_stream(llm, source.prompt(32), figures, is_over)) for _ in range(args.streams)
        ]
        await asyncio.sleep(1.0)
        figures.gaps.clear()
        figures.num_tokens, begin = 0, time.perf_counter()
        prompts = []
        for _ in range(args.prompts):
            prompts.append(asyncio.create_task(ask_long(llm, source.prompt(args.tokens), args.answer, figures)))
            await asyncio.sleep(args.interval)
        await asyncio.gather(*prompts)
        figures.seconds += time.perf_counter() - begin
        is_over.set()
        await asyncio.gather(*streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", help="a shape in gpu/models: random weights that engines make, in place of --model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=1500, help="of a long prompt; default: %(default)s")
    parser.add_argument("--prompts", type=int, default=6, help="long prompts of a round; default: %(default)s")
    parser.add_argument("--interval", type=float, default=4.0, help="seconds between them; default: %(default)s")
    parser.add_argument("--answer", type=int, default=8, help="tokens of their answers; default: %(default)s")
    parser.add_argument("--streams", type=int, default=4, help="that run all the time; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=1, help="engines for prompts; default: %(default)s")
    parser.add_argument("--decode", type=int, default=1, help="engines for answers; default: %(default)s")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine")
    args = parser.parse_args()
    if args.shape is not None:
        args.model = str(GPU_SHAPES / args.shape)
    if not args.no_wait:
        wait_for_quiet_machine(QUIET_SECONDS)
    split = {"prefill_engines": args.prefill, "decode_engines": args.decode}
    ways: dict[str, dict[str, Any]] = {
        "one engine": {},
        f"one engine, steps of {SMALL_PART} tokens": {"max_num_batched_tokens": SMALL_PART},
        f"{args.prefill} for prompts, {args.decode} for answers": split,
    }
    found = {way: Figures() for way in ways}
    source = PromptSource(0)
    for _ in range(args.rounds):
        for way, settings in ways.items():
            asyncio.run(measure(args, settings, source, found[way]))
    print(describe_machine())
    print("| | tokens apart, p50 | p99 | most | first token of prompts, p50 | streams, tokens/s |")
    print("|---|---|---|---|---|---|")
    for way, figures in found.items():
        gaps = [percentile(figures.gaps, share) * 1e3 for share in (0.5, 0.99, 1.0)]
        first = percentile(figures.first_tokens, 0.5)
        speed = figures.num_tokens / figures.seconds
        print(f"| {way} | {gaps[0]:.0f} ms | {gaps[1]:.0f} ms | {gaps[2]:.0f} ms | {first:.2f} s | {speed:.0f} |")
    one, _, apart = (percentile(figures.gaps, 0.99) for figures in found.values())
    print(f"p99 of tokens apart: {apart / one:.2f} of one engine's; {AIM} is asked")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({way: asdict(figures) for way, figures in found.items()}, file)


if __name__ == "__main__":
    main()
