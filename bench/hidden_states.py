"""What hidden states cost, on the CPU in fp32: in decode steps, in prefills, in throughput, and against transformers.

    .venv/bin/python bench/hidden_states.py

latency: the states of the last token of a finished request, read from its lease, against one decode step there and
against computing the whole text again. throughput: generation while some requests, or all, ask for the states of their
last token; the answers must be the same. prefill: all positions of a text, of one layer and of all, against a plain
prefill. Engines are compared only where they give the same states.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beams import median_step
from export_hf import DEFAULT_FOLDER, MODEL, export_model
from harness import (
    OURS,
    Engines,
    Program,
    Ratio,
    Times,
    format_spread,
    format_times,
    in_turn,
    ratios_of,
    say,
    spread,
)
from peers.process import EngineFailedError
from peers.protocol import MAX_MODEL_LEN
from workloads import PromptSource

SEED = 0
PEER = "transformers"
TOLERANCE = 1e-3  # of the largest number: sums in fp32 differ by the order in which they are made
AIMS = {20: 0.95, 100: 0.80}  # per cent of requests that ask → of the throughput without

LATENCIES = {
    "read": "last-token states of a leased request",
    "decode_step": "one decode step after it",
    "second_prefill": "the same states by a second prefill",
    PEER: "transformers, output_hidden_states=True",
}
LATENCY_RATIOS = {
    "in_steps": Ratio("reading them, in decode steps", "read", "decode_step", "at most 2"),
    "saved": Ratio("a second prefill against reading them", "second_prefill", "read"),
    PEER: Ratio("transformers against reading them", PEER, "read"),
}
PREFILLS = {
    "plain": "plain prefill: one token is generated",
    "one_layer": "all positions, one layer",
    "all_layers": "all positions, all layers",
    PEER: "transformers, which always gives all layers",
}
PREFILL_RATIOS = {
    "one_layer": Ratio("one layer against a plain prefill", "one_layer", "plain", "at most 1.1"),
    "all_layers": Ratio("all layers against a plain prefill", "all_layers", "plain"),
    "peer_one": Ratio("transformers against one layer", PEER, "one_layer"),
    "peer_all": Ratio("transformers against all layers", PEER, "all_layers"),
}


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens."""

    before: int = 1000  # the finished request, and the text of which all positions are read
    repeats: int = 9  # readings of the last token in a round: they are short
    decode_tokens: int = 21  # the first ends the prefill of a suffix, the others say what a step takes
    requests: int = 32  # at once, for the throughput
    input: int = 128
    shortest_output: int = 32  # answers end one by one, so that states are read while others are generated
    longest_output: int = 96
    shares: tuple[int, ...] = (0, 20, 100)  # per cent of the requests that ask for their states

    @property
    def outputs(self) -> list[int]:
        """The tokens of each answer, spread evenly."""
        span = self.longest_output - self.shortest_output
        return [self.shortest_output + span * index // max(self.requests - 1, 1) for index in range(self.requests)]


QUICK = Sizes(before=40, repeats=2, decode_tokens=4, requests=5, input=8, shortest_output=2, longest_output=6)


class StatesBenchmark(Program):
    doc = __doc__
    parts = ("latency", "throughput", "prefill")
    quick = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--no-peer", dest="peer", action="store_false", help="without transformers")
        parser.add_argument("--model", type=Path, metavar="FOLDER", help=f"Hugging Face folder; default: {MODEL}'s")

    def prepare(self) -> None:
        self.model = self.args.model or export_model(MODEL, DEFAULT_FOLDER)
        self.sizes = QUICK if self.args.quick else Sizes()
        facts = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        self.max_model_len = min(MAX_MODEL_LEN, facts["max_position_embeddings"])
        self.source = PromptSource(SEED, facts["vocab_size"])

    def measure(self) -> None:
        args, names = self.args, [OURS]
        if args.peer and {"latency", "prefill"} & set(args.parts):
            names.append(PEER)
        with ExitStack() as stack:
            self.running: Engines = {}
            for name in names:
                self.running[name] = self.add_engine(stack, name, self.model, self.max_model_len)
                self.running[name].start(self.source.prompt(self.sizes.input))
            for part in args.parts:
                self.found[part] = getattr(self, f"_measure_{part}")(self.running)

    def _rounds(self, part: str) -> Iterator[int]:
        for index in range(self.args.rounds):
            say(f"{part}, round {index + 1}/{self.args.rounds}")
            yield index

    # ---- latency ----

    def _measure_latency(self, engines: Engines) -> dict[str, Any]:
        times = Times(without_absent(LATENCIES, engines), LATENCY_RATIOS)
        engines[OURS].call("prepare", prompt=self.source.prompt(self.sizes.decode_tokens))  # a warm-up
        engines[OURS].call("read_last", repeats=1)
        if PEER in engines:
            engines[PEER].call("hidden_states", prompt=self.source.prompt(self.sizes.before))
        for _ in self._rounds("latency"):
            times.record(self._latencies(engines))
        return times.summary()

    def _latencies(self, engines: Engines) -> dict[str, float]:
        ours, sizes = engines[OURS], self.sizes
        text = ours.call("prepare", prompt=self.source.prompt(sizes.before - 1)).value  # and a token that it generates
        read = ours.call("read_last", repeats=sizes.repeats).value
        if read["computed_tokens"] != [1] * sizes.repeats:
            raise EngineFailedError(f"{read['computed_tokens']} rows were run for the last token's states, not 1")
        decoded = ours.call("decode_behind", suffix=self.source.prompt(1), num_tokens=sizes.decode_tokens).value
        computed = ours.call("read_prompt", prompt=text, positions=-1).value
        verify_same_states("a second prefill", read["last"], computed["last"])
        found = {
            "read": statistics.median(read["times"]),
            "decode_step": median_step(decoded["times"]),
            "second_prefill": computed["seconds"],
        }
        if PEER in engines:
            theirs = engines[PEER].call("hidden_states", prompt=text)
            verify_same_states(PEER, read["last"], theirs.value["last"])
            found[PEER] = theirs.value["seconds"]
        return found

    # ---- throughput ----

    def _measure_throughput(self, engines: Engines) -> dict[str, Any]:
        shares = self.sizes.shares
        samples: dict[int, list[float]] = {share: [] for share in shares}
        self._rates(engines, shares, 2)  # a warm-up: the same shapes, short answers
        for index in self._rounds("throughput"):
            first = index % len(shares)
            for share, rate in self._rates(engines, shares[first:] + shares[:first]).items():
                samples[share].append(rate)
        return {
            "samples": samples,
            "tokens_per_second": {share: spread(rates) for share, rates in samples.items()},
            "ratios": {share: ratios_of(samples[share], samples[shares[0]]) for share in shares[1:]},
        }

    def _rates(self, engines: Engines, shares: Sequence[int], most_tokens: int | None = None) -> dict[int, float]:
        """Returns output tokens ÷ wall time, prefill included, by share."""
        prompts = [self.source.prompt(self.sizes.input) for _ in range(self.sizes.requests)]
        lengths = [length if most_tokens is None else min(length, most_tokens) for length in self.sizes.outputs]
        rates: dict[int, float] = {}
        answers: list[list[int]] | None = None
        for share in shares:
            asking = spread_evenly(share, self.sizes.requests)
            found = engines[OURS].call("generate_with_states", prompts=prompts, lengths=lengths, asking=asking).value
            if found["rows"] != [1] * len(asking):
                raise EngineFailedError(f"{found['rows']} rows were run for {len(asking)} last tokens")
            if answers is not None and found["token_ids"] != answers:
                raise EngineFailedError(f"with {share} % of the requests asking for states, answers are others")
            answers = found["token_ids"]
            rates[share] = sum(lengths) / found["seconds"]
        return rates

    # ---- prefill ----

    def _measure_prefill(self, engines: Engines) -> dict[str, Any]:
        times = Times(without_absent(PREFILLS, engines), PREFILL_RATIOS)
        self._prefills(engines, list(times.samples))  # a warm-up
        for index in self._rounds("prefill"):
            times.record(self._prefills(engines, in_turn(times.samples, index)))
        return times.summary()

    def _prefills(self, engines: Engines, order: list[str]) -> dict[str, float]:
        prompt, found = self.source.prompt(self.sizes.before), {}
        for key in order:
            if key == PEER:
                found[key] = engines[PEER].call("hidden_states", prompt=prompt).value
            elif key == "plain":
                found[key] = engines[OURS].call("prefill", prompt=prompt).value
            else:
                layers = "all" if key == "all_layers" else "norm"
                found[key] = engines[OURS].call("read_prompt", prompt=prompt, positions="all", layers=layers).value
                if found[key]["computed_tokens"] != len(prompt):
                    raise EngineFailedError(f"{found[key]['computed_tokens']} rows were run, not {len(prompt)}")
        for key in found.keys() & {PEER, "all_layers"}:
            verify_same_states(PREFILLS[key], found["one_layer"]["mean"], found[key]["mean"])
        return {key: result["seconds"] for key, result in found.items()}

    # ---- report ----

    def title(self) -> str:
        return f"{self.model.name} in fp32, {self.args.threads} threads, {self.args.rounds} rounds"

    def report(self) -> Iterator[str]:
        before = f"{self.sizes.before:,}"
        for part, result in self.found.items():
            if part == "latency":
                yield format_times(f"The last token of {before}", LATENCIES, LATENCY_RATIOS, result)
            elif part == "prefill":
                yield format_times(f"All positions of {before} tokens", PREFILLS, PREFILL_RATIOS, result)
            else:
                yield self._format_throughput(result)

    def _format_throughput(self, result: dict[str, Any]) -> str:
        sizes = self.sizes
        lengths = f"{sizes.input} tokens in, {sizes.shortest_output} to {sizes.longest_output} out"
        lines = [f"{sizes.requests} requests at once, {lengths}; last-token states for a share of them, tok/s"]
        for share, rates in result["tokens_per_second"].items():
            line = f"  {f'{share} %':<8}{format_spread(rates):<24}"
            if share in result["ratios"]:
                line += f"{format_spread(result['ratios'][share], '×')} of without"
                line += f"; the aim is at least {AIMS[share]:g}" if share in AIMS else ""
            lines.append(line.rstrip())
        return "\n".join(lines)


def without_absent(labels: dict[str, str], engines: Engines) -> dict[str, str]:
    """Returns the labels of what is measured: without the peer where it does not run."""
    return {key: label for key, label in labels.items() if key != PEER or PEER in engines}


def verify_same_states(name: str, ours: list[float], theirs: list[float]) -> None:
    largest = max(map(abs, ours))
    apart = max((abs(our - their) for our, their in zip(ours, theirs, strict=True)), default=0.0)
    if apart > TOLERANCE * largest:
        raise EngineFailedError(f"states by {name} are {apart:.2g} apart from ours, of numbers up to {largest:.2g}")


def spread_evenly(share: int, count: int) -> list[int]:
    """Returns which of `count` requests ask, so that they are `share` per cent of them: 20 is every fifth."""
    return [index for index in range(count) if (index + 1) * share // 100 > index * share // 100]


if __name__ == "__main__":
    sys.exit(StatesBenchmark().run())
