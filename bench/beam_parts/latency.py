"""How soon stage 2 has its first result after a leased parent, against one decode step and against computing it all.

All three come from the same engine, in the same rounds.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

from cpu_peers import format_spread, spread
from peers.process import EngineFailedError, EngineProcess
from workloads import PromptSource

from beam_parts.sizes import Say, Sizes

LABELS = {
    "ttft": "stage-2 TTFT, beams after a leased parent",
    "greedy_ttft": "the same, one greedy answer in the place of beams",
    "decode_step": "one decode step after it",
    "computed_ttft": "TTFT of the whole text as a new request",
}
# Ratio: what it says, numerator and denominator, and what is aimed at.
RATIOS = {
    "ttft_in_steps": ("stage-2 TTFT in decode steps", "ttft", "decode_step", "at most 2"),
    "saved": ("computing it all against stage-2 TTFT", "computed_ttft", "ttft", "at least 20"),
}


def measure(engine: EngineProcess, source: PromptSource, sizes: Sizes, rounds: int, say: Say) -> dict[str, Any]:
    samples: dict[str, list[float]] = {key: [] for key in LABELS}
    # A warm-up: the shapes of the search once, after a short prompt.
    engine.call("beam_search", prompt=source.prompt(sizes.suffix), width=sizes.width, num_tokens=sizes.tokens)
    for index in range(rounds):
        say(f"latency, round {index + 1}/{rounds}")
        for key, value in _round(engine, source, sizes).items():
            samples[key].append(value)
    return {
        "samples": samples,
        "seconds": {key: spread(values) for key, values in samples.items()},
        "ratios": {
            key: spread([over / under for over, under in zip(samples[top], samples[bottom])])
            for key, (_, top, bottom, _) in RATIOS.items()
        },
    }


def _round(engine: EngineProcess, source: PromptSource, sizes: Sizes) -> dict[str, float]:
    search = {"width": sizes.width, "num_tokens": sizes.tokens}
    engine.call("prepare", prompt=source.prompt(sizes.before - 1))  # and a token that it generates
    found = []
    for _ in range(sizes.repeats):
        result = engine.call("search_behind", suffix=source.prompt(sizes.suffix), **search).value
        if result["inherited_tokens"] != sizes.before - 1:
            raise EngineFailedError(f"the parent's lease gave {result['inherited_tokens']} tokens, not all of them")
        found.append(result["times"][0])
    decoded = engine.call("decode_behind", suffix=source.prompt(sizes.suffix), num_tokens=sizes.decode_tokens).value
    computed = engine.call("beam_search", prompt=source.prompt(sizes.before + sizes.suffix), **search).value
    return {
        "ttft": statistics.median(found),
        "greedy_ttft": decoded["times"][0],
        "decode_step": statistics.median(later - earlier for earlier, later in pairwise(decoded["times"])),
        "computed_ttft": computed["times"][0],
    }


def format_table(result: dict[str, Any], sizes: Sizes) -> str:
    lines = [f"Stage 2 after {sizes.before} tokens and a suffix of {sizes.suffix}, ms"]
    for key, label in LABELS.items():
        in_ms = {name: 1e3 * value for name, value in result["seconds"][key].items()}
        lines.append(f"  {label:<52}{format_spread(in_ms)}")
    for key, (label, _, _, aim) in RATIOS.items():
        lines.append(f"  {label:<52}{format_spread(result['ratios'][key], '×')}; the aim is {aim}")
    return "\n".join(lines)
