"""Drafts on a GPU: milliseconds a token when a known share of them is right, against the same without drafts.

    python3 bench/gpu/speculation.py                                   # Ratoon alone
    python3 bench/gpu/speculation.py --vllm-path /tmp/vllm --json out.json

The models have random weights of the shapes in models/, but for the last product: it is zero, so that a greedy request
generates one token again and again (vLLM's does so by a bias). What comes next is known, and a source of drafts that
belongs to this program alone guesses it right with the given probability, token by token. "ngram" is the source that
users have, on the same text (nearly all of its drafts are right) and on one that is drawn freely (none is). vLLM's
n-gram mode, and vLLM without drafts, do the same two texts. A figure is (whole - first token) / the other tokens of a
request; ratios are against the same engine without drafts. The length of drafts follows from what was right of late, as
it does for users; with --always it is the longest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from compare import COMMON, OUR_SETTINGS, add_options, gpu_name, module_path, settle_options
from compare_parts.models import prepare_model
from draft_policy import KnownDrafter
from harness import OURS, align, format_spread, ratios_of, spread
from in_graphs import runner_of
from peers.machine import usable_cores
from peers.process import EngineFailedError, EngineProcess
from workloads import PromptSource

from ratoon import LLM, SamplingParams
from ratoon.scheduling.drafters.own_text import NgramDrafter
from ratoon.scheduling.speculation import Speculation

SEED = 0
TOKEN = 0  # that requests generate: the first of equals
MAX_MODEL_LEN = 2048
OFF = "off"


class OurWays:
    """One engine of Ratoon, whose source of drafts is changed between measurements."""

    def __init__(self, args: argparse.Namespace, shape: Path) -> None:
        self._args = args
        model = prepare_model(shape, args.work_folder)
        settings = COMMON | OUR_SETTINGS | {"speculate": "ngram", "speculate_tokens": args.draft} | args.settings
        if args.device == "cpu":
            settings = settings | {"device": "cpu", "dtype": "float32"}
            del settings["gpu_memory_utilization"]
        settings |= {"max_model_len": MAX_MODEL_LEN, "skip_tokenizer": True, "disable_log_stats": True}
        self.llm = LLM(str(model), enable_prefix_caching=False, **settings)
        with torch.inference_mode():
            runner_of(self.llm.engine.client.core.executor).model.lm_head.multiply.weight.zero_()
        self._source = PromptSource(SEED, json.loads((shape / "config.json").read_text())["vocab_size"])
        always: dict[str, Any] = {"min_acceptance": 0.0, "max_seqs": 1 << 20} if args.always else {}
        own = self.llm.engine.client.core.scheduler.state.speculation.config  # it knows what device it is for
        self._config = replace(own, **always)

    def ways(self) -> dict[str, tuple[Any, bool]]:
        """Returns by label the source of drafts, and whether the text repeats."""
        found: dict[str, tuple[Any, bool]] = {OFF: (None, True)}
        for acceptance in self._args.acceptances:
            found[f"{acceptance:g} right"] = KnownDrafter(acceptance, TOKEN), True
        return found | {
            "ngram, text that repeats": (NgramDrafter(3, 16), True),
            "off, text that does not": (None, False),
            "ngram, text that does not": (NgramDrafter(3, 16), False),
        }

    def measure(self, batch: int) -> dict[str, list[float]]:
        ways = {label: (self._speculation(drafter), repeats) for label, (drafter, repeats) in self.ways().items()}
        times: dict[str, list[float]] = {label: [] for label in ways}
        for index in range(self._args.rounds + 1):
            for label, (speculation, repeats) in ways.items():
                seconds = self._time(speculation, batch, repeats)
                if index:  # the first round compiles and captures
                    times[label].append(seconds)
        return times

    def _speculation(self, drafter: Any) -> Speculation:
        """It has learned from the rounds before, as in an engine that goes on with such requests."""
        state = self.llm.engine.client.core.scheduler.state
        drafters = [] if drafter is None else [drafter]
        return Speculation(self._config, drafters, state.pace, state.config.max_num_seqs)

    def _time(self, speculation: Speculation, batch: int, repeats: bool) -> float:
        """Returns the seconds of a token after the first."""
        self.llm.engine.client.core.scheduler.state.speculation = speculation
        prompts = [self._source.prompt(self._args.prompt) for _ in range(batch)]
        seconds = [self._generate(prompts, count, repeats) for count in (1, self._args.tokens)]
        return (seconds[1] - seconds[0]) / (self._args.tokens - 1)

    def _generate(self, prompts: list[list[int]], num_tokens: int, repeats: bool) -> float:
        chosen = {"temperature": 0.0} if repeats else {"temperature": 1.0, "seed": SEED}
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False, **chosen)
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - begin
        for output in outputs:
            tokens = output.outputs[0].token_ids
            if len(tokens) != num_tokens or (repeats and set(tokens) != {TOKEN}):
                raise EngineFailedError(f"an answer of {len(tokens)} tokens is not {num_tokens} times {TOKEN}")
        return seconds

    def close(self) -> None:
        self.llm.close()


def measure_vllm(args: argparse.Namespace, shape: Path) -> dict[int, dict[str, list[float]]]:
    """Returns by batch size and label the seconds of a token, of vLLM with and without its n-gram mode."""
    model = prepare_model(shape, args.work_folder)
    source = PromptSource(SEED, json.loads((shape / "config.json").read_text())["vocab_size"])
    lookup = {"method": "ngram", "num_speculative_tokens": args.draft, "prompt_lookup_min": 3, "prompt_lookup_max": 16}
    found: dict[int, dict[str, list[float]]] = {}
    for label, more in ((OFF, {}), ("ngram", {"speculative_config": lookup})):
        if label not in args.vllm_ways:
            continue
        engine = EngineProcess(
            "vllm",
            sys.executable,
            model,
            len(usable_cores()),
            args.work_folder / "logs" / f"speculation-vllm-{label}.log",
            MAX_MODEL_LEN,
            settings=COMMON | {"enable_prefix_caching": False} | more | args.vllm_settings,
            environment={"PYTHONPATH": module_path("vllm", args.vllm_path)},
            pausing=False,
        )
        try:
            engine.start(source.prompt(args.prompt))
            for batch in args.batches:
                for text, call in (("repeats", "generate_forced"), ("does not", "generate_drawn")):
                    times = found.setdefault(batch, {}).setdefault(f"{label}, text that {text}", [])
                    for index in range(args.rounds + 1):
                        prompts = [source.prompt(args.prompt) for _ in range(batch)]
                        seconds = [
                            engine.call(call, prompts=prompts, num_tokens=count, token=TOKEN).seconds
                            for count in (1, args.tokens)
                        ]
                        if index:
                            times.append((seconds[1] - seconds[0]) / (args.tokens - 1))
        except EngineFailedError as error:
            print(f"# vllm {label}: {str(error).strip().splitlines()[-1]}", flush=True)
        finally:
            engine.close()
    return found


def base_of(label: str, times: dict[str, list[float]]) -> list[float] | None:
    """Returns the times without drafts of the same text; None: these are the times without drafts."""
    if label.startswith(OFF):
        return None
    if label.endswith("does not"):
        return times.get("off, text that does not")
    return times.get(OFF) or times.get("off, text that repeats")


def report(engine: str, model: str, batch: int, times: dict[str, list[float]]) -> None:
    lines = [[f"{model}, batch {batch}, {engine}", "ms a token", "times as fast as off"]]
    for label, values in times.items():
        if not values:
            continue
        base = base_of(label, times)
        ratio = None if not base or len(base) != len(values) else ratios_of(base, values)
        record = {"engine": engine, "model": model, "batch": batch, "way": label, "seconds": values}
        print("RESULT", json.dumps(record | {"median_ms": round(1e3 * statistics.median(values), 4)}), flush=True)
        lines.append(
            [f"  {label}", format_spread(spread(values), "", 1e3), "" if ratio is None else format_spread(ratio, "×")]
        )
    print(align(lines), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--acceptances", default="0,0.6,0.9", help="shares of drafted tokens that are right")
    parser.add_argument("--vllm-ways", default="off,ngram", help="of vLLM, each an engine (default %(default)s)")
    parser.add_argument("--draft", type=int, default=8, help="most tokens of a draft (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="that a request generates (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--always", action="store_true", help="drafts of full length, whatever they are worth")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: with --settings, to try it")
    args = settle_options(parser)
    args.vllm_ways = args.vllm_ways.split(",")
    args.batches = [int(text) for text in args.batches.split(",")]
    args.acceptances = [float(text) for text in args.acceptances.split(",")]
    return args


def main() -> int:
    args = parse_arguments()
    print(f"# {gpu_name()}", flush=True)
    found: dict[str, Any] = {}
    for shape in args.shapes:
        if OURS in args.engines:
            ours = OurWays(args, shape)
            try:
                for batch in args.batches:
                    times = found[f"{shape.name} {batch} {OURS}"] = ours.measure(batch)
                    report(OURS, shape.name, batch, times)
            finally:
                ours.close()
        if "vllm" in args.engines:
            for batch, times in measure_vllm(args, shape).items():
                found[f"{shape.name} {batch} vllm"] = times
                report("vllm", shape.name, batch, times)
    if args.json:
        args.json.write_text(json.dumps({"gpu": gpu_name(), "seconds": found}, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
