"""Beam search and continuations on the CPU in fp32: how soon, how fast against peers, and how a step's cost grows.

    .venv/bin/python bench/beams.py --vllm-python .venv-vllm/bin/python --ct2-python .venv-ct2/bin/python

latency: how soon stage 2 has its first result after a leased parent, against one decode step and against computing it
all. search: whole searches by Ratoon and its peers, after a prompt that is new to them and after one that they know:
by a lease (Ratoon), the prefix cache (vLLM) or a static prompt (CTranslate2); transformers keeps nothing. steps: what
a step of a search costs, by the number of its beams and by what stands before them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from export_hf import DEFAULT_FOLDER, MODEL, export_model
from harness import (
    OURS,
    Comparison,
    Engines,
    Program,
    Ratio,
    Times,
    align,
    format_number,
    format_spread,
    format_times,
    in_turn,
    ratios_of,
    say,
    spread,
)
from peers.conversion import converted_model
from peers.process import CallResult, EngineFailedError
from peers.protocol import MAX_MODEL_LEN
from workloads import PromptSource

SEED = 0
LABELS = {
    "decode_step": "one decode step after it",
    "ttft": "stage-2 TTFT, beams after a leased parent",
    "greedy_ttft": "the same, one greedy answer in the place of beams",
    "computed_ttft": "TTFT of the whole text as a new request",
}
RATIOS = {
    "ttft_in_steps": Ratio("stage-2 TTFT in decode steps", "ttft", "decode_step", "at most 2"),
    "saved": Ratio("computing it all against stage-2 TTFT", "computed_ttft", "ttft", "at least 20"),
}
KEEPING = (OURS, "vllm", "ctranslate2")
COLD, KNOWN = "cold", "known"
# Our row and theirs, what their ratio says, and what is aimed at with each peer.
SEARCH_RATIOS: dict[str, tuple[str, str, str, dict[str, float]]] = {
    "cold": (COLD, COLD, "new prompt, both", {"vllm": 4.0, "ctranslate2": 1.8, "transformers": 15.0}),
    "leased": (KNOWN, COLD, "leased parent against new prompt", {"vllm": 20.0, "ctranslate2": 8.0}),
    "known": (KNOWN, KNOWN, "leased parent against what it keeps", {}),
}


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens."""

    before: int = 700  # what a search begins after
    suffix: int = 5
    width: int = 32
    tokens: int = 3  # of each beam
    repeats: int = 5  # searches in a round of the latency part: they are short
    decode_tokens: int = 21  # the first tells the TTFT, the others what a step takes
    prefixes: tuple[int, ...] = (64, 256, 700, 1400, 2800)
    widths: tuple[int, ...] = (4, 8, 16, 32, 64)
    step_tokens: int = 9

    @property
    def longest(self) -> int:
        """The positions that an engine needs."""
        return max(self.before, *self.prefixes) + self.suffix + max(self.tokens, self.step_tokens, self.decode_tokens)


QUICK = Sizes(before=40, width=4, repeats=2, decode_tokens=4, prefixes=(16, 48), widths=(2, 4), step_tokens=4)


class BeamBenchmark(Program):
    doc = __doc__
    rounds = 3
    parts = ("latency", "search", "steps")
    peers = (OURS, "vllm", "ctranslate2", "transformers")
    quick = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", type=Path, metavar="FOLDER", help=f"Hugging Face folder; default: {MODEL}'s")

    def prepare(self) -> None:
        self.model = self.args.model or export_model(MODEL, DEFAULT_FOLDER)
        self.sizes = QUICK if self.args.quick else Sizes()
        facts = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        self.max_position: int = facts["max_position_embeddings"]
        self.source = PromptSource(SEED, facts["vocab_size"])
        self.search = {"width": self.sizes.width, "num_tokens": self.sizes.tokens}

    def measure(self) -> None:
        with ExitStack() as stack:
            engines: Engines = {}
            for name in self.args.engines if "search" in self.args.parts else [OURS]:  # peers where they are needed
                model = converted_model(self.model, self.args.ct2_python) if name == "ctranslate2" else self.model
                longest = max(self.sizes.longest, MAX_MODEL_LEN) if name == OURS else MAX_MODEL_LEN
                engines[name] = self.add_engine(stack, name, model, min(longest, self.max_position))
                engines[name].start(self.source.prompt(self.sizes.suffix))
            for part in self.args.parts:
                self.found[part] = getattr(self, f"_measure_{part}")(engines)

    def _measure_latency(self, engines: Engines) -> dict[str, Any]:
        times, engine = Times(LABELS, RATIOS), engines[OURS]
        # A warm-up: the shapes of the search once, after a short prompt.
        engine.call("beam_search", prompt=self.source.prompt(self.sizes.suffix), **self.search)
        for index in range(self.args.rounds):
            say(f"latency, round {index + 1}/{self.args.rounds}")
            times.record(self._latencies(engines))
        return times.summary()

    def _latencies(self, engines: Engines) -> dict[str, float]:
        engine, source, sizes = engines[OURS], self.source, self.sizes
        engine.call("prepare", prompt=source.prompt(sizes.before - 1))  # and a token that it generates
        found = []
        for _ in range(sizes.repeats):
            result = engine.call("search_behind", suffix=source.prompt(sizes.suffix), **self.search).value
            if result["inherited_tokens"] != sizes.before - 1:
                raise EngineFailedError(f"the parent's lease gave {result['inherited_tokens']} tokens, not all of them")
            found.append(result["times"][0])
        decoded = engine.call("decode_behind", suffix=source.prompt(sizes.suffix), num_tokens=sizes.decode_tokens).value
        computed = engine.call("beam_search", prompt=source.prompt(sizes.before + sizes.suffix), **self.search).value
        return {
            "decode_step": median_step(decoded["times"]),
            "ttft": statistics.median(found),
            "greedy_ttft": decoded["times"][0],
            "computed_ttft": computed["times"][0],
        }

    def _measure_search(self, engines: Engines) -> dict[str, Any]:
        comparison = Comparison()
        for name, engine in engines.items():  # the shapes of the search once, after a short prompt
            say(f"search, warm-up: {name}")
            engine.call("beam_search", prompt=self.source.prompt(self.sizes.suffix), **self.search)
        for index in range(self.args.rounds):
            names = in_turn(engines, index)
            say(f"search, round {index + 1}/{self.args.rounds}: new prompt")
            prompt = self.source.prompt(self.sizes.before)
            found = {name: engines[name].call("beam_search", prompt=prompt, **self.search) for name in names}
            self._record_beams(comparison, COLD, found)
            say(f"search, round {index + 1}/{self.args.rounds}: known prompt")
            prompt, suffix = self.source.prompt(self.sizes.before - 1), self.source.prompt(self.sizes.suffix)
            known = engines[OURS].call("prepare", prompt=prompt).value  # and a token more, which it generates
            found = {}
            for name in names:
                if name in KEEPING:
                    engines[name].call("prepare", prompt=prompt if name == OURS else known)
                    found[name] = engines[name].call("search_behind", suffix=suffix, **self.search)
            self._record_beams(comparison, KNOWN, found)
        ratios = {key: comparison.against(ours, theirs) for key, (ours, theirs, _, _) in SEARCH_RATIOS.items()}
        return {**comparison.summary(), "ratios": ratios}

    def _record_beams(self, comparison: Comparison, kind: str, found: dict[str, CallResult]) -> None:
        ours = {tuple(tokens) for tokens in found[OURS].value["token_ids"]}
        for name, result in found.items():
            beams = {tuple(tokens) for tokens in result.value["token_ids"]}
            if len(beams) != self.sizes.width or {len(beam) for beam in beams} != {self.sizes.tokens}:
                raise EngineFailedError(f"{name} found {len(beams)} beams, not {self.sizes.width} of the full length")
            comparison.record(kind, name, result.seconds)
            if name != OURS:
                comparison.record_same(name, [len(beams & ours) / len(ours)])

    def _measure_steps(self, engines: Engines) -> dict[str, Any]:
        engine, sizes = engines[OURS], self.sizes
        # Tokens before → beams → seconds of a step, one value a round.
        samples: dict[int, dict[int, list[float]]] = {
            prefix: {width: [] for width in sizes.widths} for prefix in sizes.prefixes
        }
        for index in range(self.args.rounds):
            # The other way round in every second round: what changes with time must not look like growth.
            for prefix in sizes.prefixes[:: 1 if index % 2 == 0 else -1]:
                say(f"steps, round {index + 1}/{self.args.rounds}: {prefix} tokens")
                engine.call("prepare", prompt=self.source.prompt(prefix))
                for width in sizes.widths:  # the first output ends with the step that computed the suffix
                    asked = {"suffix": self.source.prompt(1), "width": width, "num_tokens": sizes.step_tokens}
                    samples[prefix][width].append(median_step(engine.call("search_behind", **asked).value["times"]))
        first, *_, last = samples.values()
        few, many = sizes.widths[0], sizes.widths[-1]
        growth = {
            "with_prefix": {width: ratios_of(last[width], first[width]) for width in first},
            "with_beams": {prefix: ratios_of(found[many], found[few]) for prefix, found in samples.items()},
        }
        seconds = {prefix: {width: spread(each) for width, each in found.items()} for prefix, found in samples.items()}
        return {"samples": samples, "seconds": seconds, "growth": growth}

    # ---- report ----

    def title(self) -> str:
        return f"{self.model.name} in fp32, {self.args.threads} threads, {self.args.rounds} rounds"

    def report(self) -> Iterator[str]:
        yield "Median (min–max). Ratios are taken round by round."
        sizes = self.sizes
        formats = {
            "latency": lambda result: format_times(
                f"Stage 2 after {sizes.before} tokens and a suffix of {sizes.suffix}", LABELS, RATIOS, result
            ),
            "search": self._format_search,
            "steps": self._format_steps,
        }
        for part, result in self.found.items():
            yield formats[part](result)

    def _format_search(self, result: dict[str, Any]) -> str:
        sizes, engines = self.sizes, list(result["seconds"][COLD])
        rows = [[f"Beams {sizes.width} × {sizes.tokens} after {sizes.before} tokens, s", *engines]]
        for kind, label in ((COLD, "new prompt"), (KNOWN, "known before")):
            rows.append([f"  {label}", *(format_spread(result["seconds"][kind].get(name)) for name in engines)])
        for key, (_, _, label, aims) in SEARCH_RATIOS.items():
            ratios = result["ratios"][key]
            cells = [
                format_spread(ratios.get(name), "×")
                + (f", aim {aims[name]:g}×" if {name} <= aims.keys() & ratios else "")
                for name in engines
            ]
            if ratios:
                rows.append([f"  {label}", *cells])
        shares = [
            f"  Beams that are also Ratoon's, {name}: {statistics.mean(found):.1%}"
            for name, found in result["same"].items()
        ]
        return "\n".join([align(rows), *shares])

    def _format_steps(self, result: dict[str, Any]) -> str:
        """Formats medians in ms; the last row and the last column say how much they grow from end to end."""
        sizes, growth = self.sizes, result["growth"]
        rows = [
            [
                "  tokens before",
                *(f"{width} beams" for width in sizes.widths),
                f"{sizes.widths[-1]} against {sizes.widths[0]}",
            ]
        ]
        for prefix in sizes.prefixes:
            times = [format_number(1e3 * result["seconds"][prefix][width]["median"]) for width in sizes.widths]
            rows.append([f"  {prefix:,}", *times, f"{format_number(growth['with_beams'][prefix]['median'])}×"])
        grown = [f"{format_number(growth['with_prefix'][width]['median'])}×" for width in sizes.widths]
        rows.append([f"  {sizes.prefixes[-1]:,} against {sizes.prefixes[0]:,}", *grown])
        return f"One step of a beam search, ms\n{align(rows)}"


def median_step(times: list[float]) -> float:
    """Returns the median time between two outputs."""
    return statistics.median(later - earlier for earlier, later in pairwise(times))


if __name__ == "__main__":
    sys.exit(BeamBenchmark().run())
