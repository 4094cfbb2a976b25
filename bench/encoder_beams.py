"""Beam search with an encoder, on the CPU in fp32: what a step costs against a greedy one, and against transformers.

    .venv/bin/python bench/encoder_beams.py

A greedy answer and a search read a text that is new to all engines. Ratoon tells when every step ended; a peer's step
is what all tokens take beyond the first, shared out. The models have the usual shape of a family and random weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from beams import median_step
from harness import (
    OURS,
    Comparison,
    Engines,
    Program,
    Row,
    format_comparison,
    format_spread,
    in_turn,
    ratios_of,
    say,
)
from peers.process import EngineFailedError, EngineProcess
from random_models import ENCODER_SHAPES, encoder_vocab_size, make_encoder_model
from workloads import PromptSource

SEED = 0
PEER = "transformers"
ROOM = 8  # positions of the decoder beyond an answer
GREEDY, BEAMS = "greedy", "beams"
ROWS = {
    "greedy": Row("greedy answer"),
    "beams": Row("beam search", aims={"transformers": "above 1×"}),
    "greedy_first": Row("greedy: first token", "ms"),
    "beams_first": Row("beams: first tokens", "ms"),
    "greedy_step": Row("greedy: step", "ms"),
    "beams_step": Row("beams: step", "ms"),
}
GROWTH_AIM = 2.0  # a step of beams against a greedy one, at most


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens."""

    input: int = 512  # of the encoder
    tokens: int = 32  # of an answer
    width: int = 5
    full_models: bool = True  # or tiny ones


QUICK = Sizes(input=20, tokens=4, width=3, full_models=False)


class EncoderBeams(Program):
    """A part is a family of models. Its engines end with it."""

    doc = __doc__
    parts = tuple(ENCODER_SHAPES)
    quick = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--no-peer", dest="peer", action="store_false", help="without transformers")

    def measure(self) -> None:
        self.sizes = QUICK if self.args.quick else Sizes()
        for family in self.args.parts:
            source = PromptSource(SEED, encoder_vocab_size(family, self.sizes.full_models))
            model, engines = make_encoder_model(family, self.sizes.full_models), {}
            with ExitStack() as stack:
                for name in (OURS, PEER) if self.args.peer else (OURS,):
                    longest = self.sizes.tokens + ROOM
                    engines[name] = self.add_engine(stack, name, model, longest, log=f"{name}_{family}")
                    engines[name].start(source.prompt(self.sizes.input))
                self.found[family] = measure_search(family, engines, source, self.sizes, self.args.rounds)

    def title(self) -> str:
        models = [ENCODER_SHAPES[family][0] if not self.args.quick else f"tiny {family}" for family in self.args.parts]
        return f"{' and '.join(models)} with random weights in fp32, {self.args.threads} threads"

    def report(self) -> Iterator[str]:
        for family, result in self.found.items():
            yield format_search(family, result, self.sizes)


def measure_search(family: str, engines: Engines, source: PromptSource, sizes: Sizes, rounds: int) -> dict[str, Any]:
    comparison = Comparison()
    for name, engine in engines.items():
        say(f"{family}, warm-up: {name}")
        for way in (GREEDY, BEAMS):
            _answer(name, engine, way, source.prompt(sizes.input), sizes)
    for index in range(rounds):
        for way in (GREEDY, BEAMS):
            say(f"{family}, round {index + 1}/{rounds}: {way}")
            prompt = source.prompt(sizes.input)
            answers = {}
            for name in in_turn(engines, index):
                times, answers[name] = _answer(name, engines[name], way, prompt, sizes)
                for key, seconds in times.items():
                    comparison.record(key, name, seconds)
            ours = set(map(tuple, answers.pop(OURS)))
            for name, theirs in answers.items():
                comparison.record_same(f"{name}, {way}", [len(ours & set(map(tuple, theirs))) / len(ours)])
    steps = comparison.samples
    growth = {name: ratios_of(values, steps["greedy_step"][name]) for name, values in steps["beams_step"].items()}
    return {**comparison.summary(), "growth": growth}


def _answer(
    name: str, engine: EngineProcess, way: str, prompt: list[int], sizes: Sizes
) -> tuple[dict[str, float], list[list[int]]]:
    """Returns the times by row, and the texts, the best first."""
    if name == OURS:
        search = {"width": sizes.width} if way == BEAMS else {}
        call = "beam_search" if way == BEAMS else "decode"
        result = engine.call(call, prompt=prompt, num_tokens=sizes.tokens, **search)
        times, texts, seconds = result.value["times"], result.value["token_ids"], result.seconds
        first, step = times[0], median_step(times)
    else:
        first, _ = _peer_call(engine, way, prompt, 1, sizes.width)
        seconds, texts = _peer_call(engine, way, prompt, sizes.tokens, sizes.width)
        step = (seconds - first) / (sizes.tokens - 1)
    expected = [sizes.tokens] * (sizes.width if way == BEAMS else 1)
    if [len(text) for text in texts] != expected:
        raise EngineFailedError(f"{name} found texts of {[len(text) for text in texts]} tokens, not {expected}")
    return {way: seconds, f"{way}_first": first, f"{way}_step": step}, texts


def _peer_call(
    engine: EngineProcess, way: str, prompt: list[int], num_tokens: int, width: int
) -> tuple[float, list[list[int]]]:
    if way == GREEDY:
        result = engine.call("generate", prompts=[prompt], num_tokens=num_tokens)
        return result.seconds, result.value
    result = engine.call("beam_search", prompt=prompt, width=width, num_tokens=num_tokens)
    return result.seconds, result.value["token_ids"]


def format_search(family: str, result: dict[str, Any], sizes: Sizes) -> str:
    title = f"{family}: {sizes.input} tokens in, {sizes.tokens} out, {sizes.width} beams"
    lines = [format_comparison(title, ROWS, result)]
    for name, growth in result["growth"].items():
        aim = f"; the aim is at most {GROWTH_AIM:g}" if name == OURS else ""
        lines.append(f"  A step of {sizes.width} beams against a greedy one, {name}: {format_spread(growth, '×')}{aim}")
    for name, shares in result["same"].items():
        lines.append(f"  Texts that are also Ratoon's, {name}: {statistics.mean(shares):.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(EncoderBeams().run())
