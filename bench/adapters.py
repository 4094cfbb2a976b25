"""Adapters (LoRA) on a CPU: requests over several adapters against the same requests without, and the time to switch an
adapter in from its files.

    .venv/bin/python bench/adapters.py
    .venv/bin/python bench/adapters.py --parts float32 --rank 64 --dtype bfloat16

All requests run at once, and each has one of the adapters in turn, so that every step has all of them. The model has
the shape of SmolLM2-135M and random weights, and so have the adapters, for all linear layers. Switched in: one token
for an adapter that is in no slot, less one token for the same adapter again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from export_hf import CACHE_FOLDER
from harness import Program, Ratio, Times, count, format_times, in_turn, say
from random_adapters import make_adapters
from random_models import make_random_model
from workloads import PromptSource

from ratoon import LLM, SamplingParams

SEED = 0
FLOATS, QUANTISED = "float32", "Q4_0"
OFF, BASE, AMONG, ONE, MANY = "off", "base", "one among plain", "one adapter", "several adapters"
LABELS = {
    OFF: "an engine without slots for adapters",
    BASE: "without adapters",
    AMONG: "one with an adapter, the others without",
    ONE: "all with the same adapter",
    MANY: "with several adapters",
}
RATIOS = {
    "base": Ratio("throughput without, against no slots", OFF, BASE),
    "among": Ratio("throughput with one among plain", BASE, AMONG),
    "one": Ratio("throughput with one, against without", BASE, ONE),
    "many": Ratio("throughput with several, against without", BASE, MANY, "at least 0.85"),
}
SWITCH_LABELS = {"there": "one token, adapter in its slot", "files": "one token, adapter in its files"}
SWITCH_AIM_MS = 50


class Adapters(Program):
    """A part is a format of the weights. Its engine ends with it."""

    doc = __doc__
    parts = (FLOATS, QUANTISED)
    quick = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        count(parser, "--requests", 32)
        count(parser, "--adapters", 8)
        count(parser, "--rank", 16)
        count(parser, "--input", 32)
        count(parser, "--output", 32)
        parser.add_argument(
            "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the adapters' files"
        )

    def prepare(self) -> None:
        self.shape = "tiny" if self.args.quick else "smollm2-135m"
        self.model = make_random_model(self.shape, (QUANTISED,))
        from ratoon.models.source import resolve_model

        shapes = resolve_model(str(self.model.folder)).tensors.shapes()
        folder, args = CACHE_FOLDER / "adapters" / self.model.folder.name, self.args
        self.folders = make_adapters(folder, shapes, args.adapters + 1, args.rank, args.dtype)

    def measure(self) -> None:
        for part in self.args.parts:
            path = self.model.folder if part == FLOATS else self.model.files[QUANTISED]
            self.found[part] = self._measure(path)

    def _measure(self, path: Path) -> dict[str, Any]:
        args = self.args
        settings: dict[str, Any] = {
            "device": "cpu", "num_threads": args.threads, "max_num_seqs": args.requests, "max_model_len": 1024,
            "enable_prefix_caching": False, "skip_tokenizer": True,
        }  # fmt: skip
        slots = {"max_loras": args.adapters, "max_lora_rank": args.rank}
        adapters = {f"adapter-{number}": str(folder) for number, folder in enumerate(self.folders)}
        source = PromptSource(SEED, 400 if self.args.quick else 40_000)
        throughput, switches = Times(LABELS, RATIOS), Times(SWITCH_LABELS, {})
        with LLM(str(path), adapters=adapters, **slots, **settings) as llm, LLM(str(path), **settings) as plain:
            for index in range(args.rounds + 1):  # the first one warms up
                engines = {way: plain if way == OFF else llm for way in LABELS}
                round_of = {way: self._answer(engines[way], source, way) for way in in_turn(LABELS, index)}
                switched = self._switch(llm, source, index)
                if index:
                    say(f"{path.name}, round {index}/{args.rounds}")
                    throughput.record(round_of)
                    switches.record(switched)
        return {"throughput": throughput.summary(), "switches": switches.summary()}

    def _answer(self, llm: LLM, source: PromptSource, way: str) -> float:
        """Seconds of all requests."""
        args = self.args
        prompts = [source.prompt(args.input) for _ in range(args.requests)]
        numbers = range(args.requests)
        named: dict[str, list[str | None]] = {way: [None for _ in numbers] for way in (OFF, BASE)} | {
            ONE: ["adapter-0" for _ in numbers]
        }
        named[AMONG] = ["adapter-0", *named[BASE][1:]]
        named[MANY] = [f"adapter-{number % args.adapters}" for number in numbers]
        for name in dict.fromkeys(named[way]):  # which brings it to its slot
            llm.generate(source.prompt(4), SamplingParams(max_tokens=1), adapter=name, progress=False)
        params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, adapter=named[way], progress=False)
        seconds = time.perf_counter() - begin
        assert {len(output.outputs[0].token_ids) for output in outputs} == {args.output}
        return seconds

    def _switch(self, llm: LLM, source: PromptSource, index: int) -> dict[str, float]:
        """One adapter more than there are slots: the next in turn is the one that was used longest ago."""
        name, times = f"adapter-{index % len(self.folders)}", {}
        params = SamplingParams(temperature=0, max_tokens=1)
        for other in range(1, len(self.folders)):  # all others, in the order in which they come next
            llm.generate(
                source.prompt(4), params, adapter=f"adapter-{(index + other) % len(self.folders)}", progress=False
            )
        for way in ("files", "there"):
            begin = time.perf_counter()
            llm.generate(source.prompt(4), params, adapter=name, progress=False)
            times[way] = time.perf_counter() - begin
        return times

    def title(self) -> str:
        args = self.args
        shown = f"{args.requests} requests over {args.adapters} adapters of rank {args.rank} in {args.dtype}"
        return f"{self.shape}, {shown}, {args.threads} threads"

    def report(self) -> Iterator[str]:
        for part, result in self.found.items():
            yield format_times(f"{part}: {self.args.output} tokens each", LABELS, RATIOS, result["throughput"])
            samples = result["switches"]["samples"]
            gains = sorted(1e3 * (slow - fast) for slow, fast in zip(samples["files"], samples["there"], strict=True))
            shown = f"{gains[len(gains) // 2]:.0f} ms ({gains[0]:.0f}-{gains[-1]:.0f})"
            yield f"{part}: an adapter is switched in from its files in {shown}; the aim is below {SWITCH_AIM_MS} ms"


if __name__ == "__main__":
    sys.exit(Adapters().run())
