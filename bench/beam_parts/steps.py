"""What one step of a search costs, by the number of its beams and by what stands before them."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

from cpu_peers import format_number, spread
from peers.process import EngineProcess
from workloads import PromptSource

from beam_parts.sizes import Say, Sizes

Samples = dict[int, dict[int, list[float]]]  # tokens before → beams → seconds of a step, one value a round


def measure(engine: EngineProcess, source: PromptSource, sizes: Sizes, rounds: int, say: Say) -> dict[str, Any]:
    samples: Samples = {prefix: {width: [] for width in sizes.widths} for prefix in sizes.prefixes}
    for index in range(rounds):
        # The other way round in every second round: what changes with time must not look like growth.
        for prefix in sizes.prefixes[:: 1 if index % 2 == 0 else -1]:
            say(f"steps, round {index + 1}/{rounds}: {prefix} tokens")
            engine.call("prepare", prompt=source.prompt(prefix))
            for width in sizes.widths:
                samples[prefix][width].append(_step_seconds(engine, source, width, sizes.step_tokens))
    seconds = {
        prefix: {width: spread(values) for width, values in by_width.items()} for prefix, by_width in samples.items()
    }
    return {"samples": samples, "seconds": seconds, "growth": _growth(samples)}


def _step_seconds(engine: EngineProcess, source: PromptSource, width: int, num_tokens: int) -> float:
    """The first output ends with the step that computed the suffix; the steps after it have all beams."""
    result = engine.call("search_behind", suffix=source.prompt(1), width=width, num_tokens=num_tokens)
    return statistics.median(later - earlier for earlier, later in pairwise(result.value["times"]))


def _growth(samples: Samples) -> dict[str, dict[int, dict[str, float]]]:
    """Longest against shortest prefix for each width, most against fewest beams for each prefix, round by round."""
    first, *_, last = samples.values()
    return {
        "with_prefix": {
            width: spread([long / short for short, long in zip(first[width], last[width])]) for width in first
        },
        "with_beams": {
            prefix: spread([many / few for few, many in zip(*_ends(list(by_width.values())))])
            for prefix, by_width in samples.items()
        },
    }


def _ends(values: list[list[float]]) -> tuple[list[float], list[float]]:
    return values[0], values[-1]


def format_table(result: dict[str, Any], sizes: Sizes) -> str:
    """Medians in ms; the last row and the last column say how much they grow from end to end."""
    growth = result["growth"]
    few, many = sizes.widths[0], sizes.widths[-1]
    short, long = sizes.prefixes[0], sizes.prefixes[-1]
    rows = [["tokens before", *(f"{width} beams" for width in sizes.widths), f"{many} against {few}"]]
    for prefix in sizes.prefixes:
        times = [format_number(1e3 * result["seconds"][prefix][width]["median"]) for width in sizes.widths]
        rows.append([f"{prefix:,}", *times, _ratio(growth["with_beams"][prefix])])
    rows.append([f"{long:,} against {short:,}", *(_ratio(growth["with_prefix"][width]) for width in sizes.widths), ""])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join(["One step of a beam search, ms", *lines])


def _ratio(values: dict[str, float]) -> str:
    return f"{format_number(values['median'])}×"
