"""What worker processes, tensor-parallel ranks and pipeline stages cost on a CPU, against the engine in one process.

    .venv/bin/python bench/ranks.py --json ranks.json        # all of it, in less than four minutes on 16 cores
    .venv/bin/python bench/ranks.py --parts broadcast,sums   # messages alone: no model

Weights are random numbers of a known shape; nothing is downloaded. A CPU gains nothing from ranks, which read the same
memory by the same cores: the ratios show what plans, sums, rows between stages and processes take. Of one sequence one
stage at a time is busy; several keep all of them busy.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import Program, align, count, format_spread, in_turn, ratios_of, say, spread
from random_models import COMMON, SHAPES
from rank_parts.messages import NUM_BRANCHES, NUM_READERS, measure_broadcast
from rank_parts.sums import measure_sums

from ratoon import LLM, SamplingParams

SEED = 5
# SmolLM2-135M has nine heads and three key-value heads, which neither two nor four ranks can share.
MODELS: dict[str, dict[str, Any]] = {
    "smollm2": {**SHAPES["smollm2-135m"], "num_attention_heads": 8, "num_key_value_heads": 4},
    "8b, two layers": {
        **SHAPES["smollm2-135m"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    "tiny": {**SHAPES["tiny"], "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}  # fmt: skip
AIMS = {"broadcast": "below 100 µs", "one worker": "above 0.97×", "ranks": "at least 0.9×"}
WORLD_SIZES, QUICK_WORLD_SIZES = (2, 4), (2,)
NUM_STAGES = 2
MAX_MODEL_LEN = 1024


class Work:
    """Requests that an engine is timed with."""

    def __init__(self, label: str, num_requests: int, prompt_tokens: int, output_tokens: int) -> None:
        self.label = label
        self.num_requests, self.prompt_tokens, self.output_tokens = num_requests, prompt_tokens, output_tokens

    def prompts(self, vocab_size: int, dice: random.Random) -> list[list[int]]:
        """Other ones in every round: none finds its beginning in the cache."""
        return [[dice.randrange(vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.num_requests)]

    def seconds(self, llm: LLM, prompts: list[list[int]]) -> float:
        params = SamplingParams(temperature=0, max_tokens=self.output_tokens, ignore_eos=True)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - begin
        assert all(len(output.outputs[0].token_ids) == self.output_tokens for output in outputs)
        return seconds


PROMPT = Work("a prompt of 512 tokens", 1, 512, 1)
WORKS = {
    "smollm2": (Work("one sequence, 64 tokens", 1, 8, 64), Work("16 sequences, 32 tokens each", 16, 8, 32), PROMPT),
    "8b, two layers": (
        Work("one sequence, 16 tokens", 1, 8, 16),
        Work("16 sequences, 8 tokens each", 16, 8, 8),
        PROMPT,
    ),
    "tiny": (Work("one sequence, 4 tokens", 1, 8, 4),),
}


class Ranks(Program):
    doc = __doc__ or ""
    parts = ("broadcast", "sums", "one-worker", "ranks", "stages")
    quick = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        count(parser, "--plans", 1000, "broadcasts that are timed")

    def measure(self) -> None:
        for part in self.args.parts:
            say(part)
            self.found[part] = getattr(self, f"_measure_{part.replace('-', '_')}")()

    @property
    def _world_sizes(self) -> tuple[int, ...]:
        return QUICK_WORLD_SIZES if self.args.quick else WORLD_SIZES

    # ---- messages ----

    def _measure_broadcast(self) -> dict[str, Any]:
        times = measure_broadcast(20 if self.args.quick else self.args.plans)
        return {name: spread(values) | {"p90": sorted(values)[len(values) * 9 // 10]} for name, values in times.items()}

    def _measure_sums(self) -> dict[str, Any]:
        world_size = max(self._world_sizes)
        threads = max(1, self.args.threads // world_size)
        found = measure_sums(world_size, threads, self.args.rounds, 4 if self.args.quick else 200)
        return {"world_size": world_size, "threads": threads, **found}

    # ---- engines ----

    def _measure_one_worker(self) -> dict[str, Any]:
        model = "tiny" if self.args.quick else "smollm2"
        settings = {"num_threads": self.args.threads}
        return {model: self._compare(model, {"in-process": settings, "one worker": {**settings, "executor": "mp"}})}

    def _measure_ranks(self) -> dict[str, Any]:
        found = {}
        for model in ["tiny"] if self.args.quick else ["smollm2", "8b, two layers"]:
            for world_size in self._world_sizes:
                each = max(1, self.args.threads // max(self._world_sizes))
                one = {"num_threads": each * world_size}
                several = {"num_threads": each, "tensor_parallel_size": world_size}
                label = f"{model}: {world_size} ranks × {each} threads"
                say(label)
                found[label] = self._compare(model, {"one process": one, "ranks": several})
        return found

    def _measure_stages(self) -> dict[str, Any]:
        found = {}
        for model in ["tiny"] if self.args.quick else ["smollm2", "8b, two layers"]:
            each = max(1, self.args.threads // NUM_STAGES)
            one = {"num_threads": each * NUM_STAGES}
            several = {"num_threads": each, "pipeline_parallel_size": NUM_STAGES}
            label = f"{model}: {NUM_STAGES} stages × {each} threads"
            say(label)
            found[label] = self._compare(model, {"one process": one, "stages": several})
        return found

    def _compare(self, model: str, engines: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Seconds of each work by each engine, which take turns."""
        dice = random.Random(SEED)
        works = WORKS[model]
        times: dict[str, dict[str, list[float]]] = {work.label: {name: [] for name in engines} for work in works}
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (folder / "config.json").write_text(json.dumps({**MODELS[model], **COMMON}))
            opened = {}
            for name, settings in engines.items():
                common = {"device": "cpu", "load_format": "dummy", "skip_tokenizer": True, "num_blocks": 256}
                llm = LLM(str(folder), max_model_len=MAX_MODEL_LEN, max_num_seqs=32, **common, **settings)
                opened[name] = stack.enter_context(llm)
            for index in range(self.args.rounds + 1):
                for work in works:
                    prompts = work.prompts(MODELS[model]["vocab_size"], dice)
                    for name in in_turn(engines, index):
                        seconds = work.seconds(opened[name], prompts)
                        if index:  # the first round records passes
                            times[work.label][name].append(seconds)
        first, second = engines
        return {
            label: {
                "seconds": {name: spread(values) for name, values in by_name.items()},
                "ratio": ratios_of(by_name[first], by_name[second]),
            }
            for label, by_name in times.items()
        }

    # ---- the report ----

    def title(self) -> str:
        return "worker processes, tensor-parallel ranks and stages"

    def report(self) -> Iterable[str]:
        for part, found in self.found.items():
            yield getattr(self, f"_report_{part.replace('-', '_')}")(found)

    def _report_broadcast(self, found: dict[str, Any]) -> str:
        labels = {
            "encode": "the plan is encoded",
            "write": "it is written, and readers are woken",
            "read": f"from there until {NUM_READERS} readers have it; the aim is {AIMS['broadcast']}",
            "whole": "from before encoding until all have decoded it",
        }
        rows = [[f"a plan of {NUM_BRANCHES} branches, µs", "median (min–max)", "9 of 10 below"]]
        rows += [
            [f"  {label}", format_spread(found[key], "", 1e6), f"{1e6 * found[key]['p90']:.0f}"]
            for key, label in labels.items()
        ]
        return align(rows)

    def _report_sums(self, found: dict[str, Any]) -> str:
        rows = [[f"{found['world_size']} ranks × {found['threads']} threads, µs", "", "", "ratio"]]
        titles = {"sums": "sum of float32", "choices": "choice from logits", "exchanges": "results of experts"}
        for part, title in titles.items():
            for size, ways in found[part].items():
                ours, theirs = ways.values()
                cells = [f"{name} {format_spread(spread(values), '', 1e6)}" for name, values in ways.items()]
                rows.append([f"  {title}, {size}", *cells, format_spread(ratios_of(theirs, ours), "×")])
        return align(rows)

    def _report_engines(self, title: str, found: dict[str, Any], aim: str) -> str:
        rows = []
        for label, works in found.items():
            names = list(next(iter(works.values()))["seconds"])
            speed = f"speed of {names[1]}"
            rows.append([f"{title}{label}, ms", *names, f"{speed}; the aim is {aim}" if aim else speed])
            for work, values in works.items():
                cells = [format_spread(values["seconds"][name], "", 1e3) for name in names]
                rows.append([f"  {work}", *cells, format_spread(values["ratio"], "×")])
        return align(rows)

    def _report_one_worker(self, found: dict[str, Any]) -> str:
        return self._report_engines("one worker process, ", found, AIMS["one worker"])

    def _report_ranks(self, found: dict[str, Any]) -> str:
        return self._report_engines("", found, AIMS["ranks"])

    def _report_stages(self, found: dict[str, Any]) -> str:
        return self._report_engines("", found, "")


if __name__ == "__main__":
    sys.exit(Ranks().run())
