"""What hidden states cost requests without them: a decode step with nothing to read, and its two parts that know about
them; where there is one, against an earlier version of the engine.
"""

from __future__ import annotations

from typing import Any

from cpu_peers import OURS, format_spread, spread
from peers.process import EngineFailedError
from workloads import PromptSource

from hidden_parts.sizes import Engines, Say, Sizes

BEFORE = "before"  # the earlier version, among the engines
LABELS = {"step": "a decode step", "planning": "of it, the plan", "forward": "of it, the model"}


def measure(engines: Engines, source: PromptSource, sizes: Sizes, rounds: int, say: Say) -> dict[str, Any]:
    names = [name for name in (OURS, BEFORE) if name in engines]
    samples: dict[str, dict[str, list[float]]] = {name: {key: [] for key in LABELS} for name in names}
    for name in names:  # a warm-up
        engines[name].call("watch_decode", prompt=source.prompt(sizes.idle_before), num_tokens=3)
    for index in range(rounds):
        say(f"idle, round {index + 1}/{rounds}")
        prompt = source.prompt(sizes.idle_before)
        found = {}
        for name in names if index % 2 == 0 else names[::-1]:
            found[name] = engines[name].call("watch_decode", prompt=prompt, num_tokens=sizes.idle_tokens).value
            for key in LABELS:
                samples[name][key].append(found[name][key])
        if found[OURS]["reading_passes"]:
            raise EngineFailedError(f"{found[OURS]['reading_passes']} passes looked for states that were not requested")
        kernels = {name: result["kernels"] for name, result in found.items()}
        if len(set(kernels.values())) > 1:
            raise EngineFailedError(f"the two versions run with different kernels: {kernels}")
    return {
        "samples": samples,
        "seconds": {name: {key: spread(values) for key, values in by_key.items()} for name, by_key in samples.items()},
        "ratios": {
            key: spread([ours / theirs for ours, theirs in zip(samples[OURS][key], samples[BEFORE][key])])
            for key in LABELS
            if BEFORE in samples
        },
    }


def format_table(result: dict[str, Any], sizes: Sizes) -> str:
    lines = [
        f"A step with nothing to read, {sizes.idle_before} tokens in; no pass went through the code that reads, ms"
    ]
    for key, label in LABELS.items():
        cells = [
            format_spread({name: 1e3 * value for name, value in by_key[key].items()})
            for by_key in result["seconds"].values()
        ]
        line = f"  {label:<20}{cells[0]:<26}"
        if key in result["ratios"]:
            line += f"{format_spread(result['ratios'][key], '×')} of an earlier version's {cells[1]}"
        lines.append(line.rstrip())
    return "\n".join(lines)
