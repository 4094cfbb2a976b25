"""Drafts on a GPU: milliseconds a token when a known share of them is right, against the same without drafts.

    python3 bench/gpu/speculation.py                                   # Ratoon alone
    python3 bench/gpu/speculation.py --vllm-path /tmp/vllm --json out.json

The models have random weights of the shapes in models/, and their greedy text counts (compare_parts/models.py): what
comes next is known. A prompt has the tokens that will follow, with a wrong one behind each with a given probability, so
that drafts from a request's own text, the source that users have, are right token by token with the rest. One token is
enough to find a draft. With 0 right all drafts are wrong; "none" is a prompt without the tokens that will follow. vLLM
reads the same files, and does the same with its n-gram mode and without, in two engines. A figure is (whole - first
token) / the other tokens of a request; ratios are against the same engine without drafts. Ratoon's drafts are as long
as what was right of late lets them be, as for users; with --always they are the longest.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare import COMMON, OUR_SETTINGS, add_options, gpu_name, module_path, settle_options
from compare_parts.models import write_counting_model
from harness import OURS, align, format_spread, ratios_of, spread
from peers.machine import usable_cores
from peers.process import EngineFailedError, EngineProcess

from ratoon import LLM, SamplingParams
from ratoon.scheduling.drafters.own_text import NgramDrafter
from ratoon.scheduling.speculation import Speculation

LEAST, MOST = 1, 16  # last tokens that are compared
FIRST_TOKEN = 1000  # that occurs in texts
OFF, NONE = "off", "none found"
SETTINGS = {"load_format": "auto", "enable_prefix_caching": False}

Times = dict[str, list[float]]  # by way: seconds of a token, by round


class CountingPrompts:
    def __init__(self, vocab_size: int, num_tokens: int, num_others: int) -> None:
        """`num_tokens`: that requests generate. `num_others`: random ones that a prompt has before those of its text,
        at least."""
        self._random = random.Random(0)
        self._vocab_size = vocab_size
        self._num_tokens = num_tokens
        self._length = num_others + 2 * num_tokens + 1

    def prompt(self, acceptance: float | None) -> list[int]:
        """None: nothing in the prompt is of use. The text goes on with the token behind the last one."""
        first = self._random.randrange(FIRST_TOKEN, self._vocab_size - self._num_tokens - 1)
        text = []
        if acceptance is not None:
            for token in range(first, first + self._num_tokens):
                text += [token] if self._random.random() < acceptance else [token, self._any()]
        return [*(self._any() for _ in range(self._length - 1 - len(text))), *text, first]

    def _any(self) -> int:
        return self._random.randrange(FIRST_TOKEN, self._vocab_size)


def verify(prompts: list[list[int]], answers: list[list[int]], num_tokens: int) -> None:
    for prompt, tokens in zip(prompts, answers, strict=True):
        if tokens != list(range(prompt[-1] + 1, prompt[-1] + 1 + num_tokens)):
            raise EngineFailedError(f"behind {prompt[-1]} came {len(tokens)} tokens, {tokens[:8]} and so on")


class OurWays:
    """One engine of Ratoon, whose source of drafts is changed between measurements."""

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        settings: dict[str, Any] = COMMON | OUR_SETTINGS | SETTINGS
        settings |= {"speculate": "ngram", "speculate_tokens": args.draft}
        settings |= {"max_model_len": args.max_model_len, "skip_tokenizer": True, "disable_log_stats": True}
        if args.device == "cpu":
            settings |= {"device": "cpu", "dtype": "float32"}
            del settings["gpu_memory_utilization"]
        self._llm = LLM(str(model), **(settings | args.settings))
        always: dict[str, Any] = {"min_acceptance": 0.0, "max_seqs": 1 << 20} if args.always else {}
        self._scheduler = self._llm.engine.client.core.scheduler
        self._config = replace(self._scheduler.state.speculation.config, **always)  # it knows what device it is for

    def use(self, drafts: bool) -> Speculation:
        """It keeps what it learns from round to round, as in an engine that goes on with such requests."""
        state = self._scheduler.state
        drafters = [NgramDrafter(LEAST, MOST)] if drafts else []
        return Speculation(self._config, drafters, state.pace, state.config.max_num_seqs)

    def generate(self, speculation: Speculation, prompts: list[list[int]], num_tokens: int) -> float:
        self._scheduler.state.speculation = speculation
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - begin
        verify(prompts, [output.outputs[0].token_ids for output in outputs], num_tokens)
        return seconds

    def close(self) -> None:
        self._llm.close()


class VllmWays:
    """Two engines of vLLM, with and without its n-gram mode."""

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        lookup = {"method": "ngram", "num_speculative_tokens": args.draft}
        lookup |= {"prompt_lookup_min": LEAST, "prompt_lookup_max": MOST}
        self._engines = {
            drafts: EngineProcess(
                "vllm",
                sys.executable,
                model,
                len(usable_cores()),
                args.work_folder / "logs" / f"speculation-vllm-{model.name}-{'ngram' if drafts else 'off'}.log",
                args.max_model_len,
                settings=COMMON | SETTINGS | more | args.vllm_settings,
                environment={"PYTHONPATH": module_path("vllm", args.vllm_path)},
                pausing=False,
            )
            for drafts, more in ((False, {}), (True, {"speculative_config": lookup}))
        }

    def start(self, pool: Executor) -> list[Future[float]]:
        prompt = list(range(FIRST_TOKEN, FIRST_TOKEN + 100))
        return [pool.submit(engine.start, prompt) for engine in self._engines.values()]

    def use(self, drafts: bool) -> EngineProcess:
        return self._engines[drafts]

    def generate(self, engine: EngineProcess, prompts: list[list[int]], num_tokens: int) -> float:
        answer = engine.generate(prompts, num_tokens)
        verify(prompts, answer.token_ids, num_tokens)
        return answer.seconds

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def measure(engine: OurWays | VllmWays, args: argparse.Namespace, source: CountingPrompts, batch: int) -> Times:
    """All ways in turn, round by round. The first round compiles and captures."""
    ways: dict[str, tuple[Any, float | None]] = {OFF: (engine.use(drafts=False), None)}
    ways |= {f"{acceptance:g} right": (engine.use(drafts=True), acceptance) for acceptance in args.acceptances}
    ways[NONE] = engine.use(drafts=True), None
    times: Times = {label: [] for label in ways}
    for index in range(args.rounds + 1):
        for label, (way, acceptance) in ways.items():
            prompts = [source.prompt(acceptance) for _ in range(batch)]
            first, whole = (engine.generate(way, prompts, count) for count in (1, args.tokens))
            if index:
                times[label].append((whole - first) / (args.tokens - 1))
    return times


def report(engine: str, model: str, batch: int, times: Times) -> None:
    lines = [[f"{model}, batch {batch}, {engine}", "ms a token", "times as fast as off"]]
    for label, values in times.items():
        record = {"engine": engine, "model": model, "batch": batch, "way": label, "seconds": values}
        print("RESULT", json.dumps(record | {"median_ms": round(1e3 * statistics.median(values), 4)}), flush=True)
        ratio = "" if label == OFF else format_spread(ratios_of(times[OFF], values), "×")
        lines.append([f"  {label}", format_spread(spread(values), "", 1e3), ratio])
    print(align(lines), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--acceptances", default="0,0.6,0.9,1", help="shares of drafted tokens that are right")
    parser.add_argument("--draft", type=int, default=7, help="most tokens of a draft (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="random tokens of a prompt (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="that a request generates (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--always", action="store_true", help="drafts of full length, whatever they are worth")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: with --settings, to try it")
    args = settle_options(parser)
    args.batches = [int(text) for text in args.batches.split(",")]
    args.acceptances = [float(text) for text in args.acceptances.split(",")]
    args.max_model_len = args.prompt + 3 * args.tokens + 16
    return args


def our_engines(args: argparse.Namespace, models: list[Path]) -> Iterator[tuple[Path, OurWays]]:
    """One after the other."""
    for model in models:
        engine = OurWays(args, model)
        try:
            yield model, engine
        finally:
            engine.close()


def vllm_engines(args: argparse.Namespace, models: list[Path]) -> Iterator[tuple[Path, VllmWays]]:
    """They start beside each other, which takes minutes: --vllm-settings may say how much memory each gets."""
    engines = [VllmWays(args, model) for model in models]
    try:
        with ThreadPoolExecutor(2 * len(engines)) as pool:
            starts = [engine.start(pool) for engine in engines]
        for model, engine, futures in zip(models, engines, starts, strict=True):
            errors = [error for future in futures if (error := future.exception()) is not None]
            for error in errors:
                print(f"# vllm {model.name}: {str(error).strip().splitlines()[-1]}", flush=True)
            if not errors:
                yield model, engine
    finally:
        for engine in engines:
            engine.close()


def main() -> int:
    args = parse_arguments()
    print(f"# {gpu_name()}", flush=True)
    found: dict[str, Times] = {}
    models = [write_counting_model(shape, args.work_folder, args.device) for shape in args.shapes]
    for name in args.engines:
        engines: Iterator[tuple[Path, Any]] = our_engines(args, models) if name == OURS else vllm_engines(args, models)
        for model, engine in engines:
            vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
            for batch in args.batches:
                source = CountingPrompts(vocab_size, args.tokens, args.prompt)
                times = found[f"{model.name} {batch} {name}"] = measure(engine, args, source, batch)
                report(name, model.name, batch, times)
    if args.json:
        args.json.write_text(json.dumps({"gpu": gpu_name(), "seconds": found}, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
