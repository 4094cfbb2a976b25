"""A greedy answer and a beam search over an encoder input, whole and in steps, by us and by transformers.

Each of them reads a text that is new to all engines. Ours tells when every step ended; transformers' step is what all
tokens take beyond the first, shared out.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

from comparison import Comparison, Row, format_comparison
from cpu_peers import OURS, format_spread, spread
from peers.process import EngineFailedError, EngineProcess
from program import in_turn
from workloads import PromptSource

from encoder_beam_parts.sizes import Engines, Say, Sizes

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


def measure(family: str, engines: Engines, source: PromptSource, sizes: Sizes, rounds: int, say: Say) -> dict[str, Any]:
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
            for name in answers:
                if name != OURS:
                    comparison.record_same(f"{name}, {way}", [_share(answers[OURS], answers[name])])
    growth = {
        name: spread([beams / greedy for greedy, beams in zip(comparison.samples["greedy_step"][name], values)])
        for name, values in comparison.samples["beams_step"].items()
    }
    return {**comparison.summary(), "growth": growth}


def _answer(
    name: str, engine: EngineProcess, way: str, prompt: list[int], sizes: Sizes
) -> tuple[dict[str, float], list[list[int]]]:
    """Its times, by row, and its texts, the best first."""
    if name == OURS:
        search = {"width": sizes.width} if way == BEAMS else {}
        call = "beam_search" if way == BEAMS else "decode"
        result = engine.call(call, prompt=prompt, num_tokens=sizes.tokens, **search)
        times = result.value["times"]
        first, step = times[0], statistics.median(later - earlier for earlier, later in pairwise(times))
        texts = result.value["token_ids"]
        seconds = result.seconds
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


def _share(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Of our texts that they have as well."""
    return len(set(map(tuple, ours)) & set(map(tuple, theirs))) / len(ours)


def format_table(family: str, result: dict[str, Any], sizes: Sizes) -> str:
    title = f"{family}: {sizes.input} tokens in, {sizes.tokens} out, {sizes.width} beams"
    lines = [format_comparison(title, ROWS, result)]
    for name, growth in result["growth"].items():
        aim = f"; the aim is at most {GROWTH_AIM:g}" if name == OURS else ""
        lines.append(f"  A step of {sizes.width} beams against a greedy one, {name}: {format_spread(growth, '×')}{aim}")
    for name, shares in result["same"].items():
        lines.append(f"  Texts that are also Ratoon's, {name}: {sum(shares) / len(shares):.1%}")
    return "\n".join(lines)
