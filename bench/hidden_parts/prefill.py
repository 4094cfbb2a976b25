"""All positions of a text, of one layer and of all, against a plain prefill of the same tokens."""

from __future__ import annotations

from typing import Any

from cpu_peers import OURS
from peers.process import EngineFailedError
from workloads import PromptSource

from hidden_parts.agreement import verify_same_states
from hidden_parts.sizes import Engines, Say, Sizes
from hidden_parts.tables import Ratio, format_times, summarize

PEER = "transformers"
LABELS = {
    "plain": "plain prefill: one token is generated",
    "one_layer": "all positions, one layer",
    "all_layers": "all positions, all layers",
    PEER: "transformers, which always gives all layers",
}
RATIOS = {
    "one_layer": Ratio("one layer against a plain prefill", "one_layer", "plain", "at most 1.1"),
    "all_layers": Ratio("all layers against a plain prefill", "all_layers", "plain"),
    "peer_one": Ratio("transformers against one layer", PEER, "one_layer"),
    "peer_all": Ratio("transformers against all layers", PEER, "all_layers"),
}


def measure(engines: Engines, source: PromptSource, sizes: Sizes, rounds: int, say: Say) -> dict[str, Any]:
    samples: dict[str, list[float]] = {key: [] for key in LABELS if key != PEER or PEER in engines}
    _round(engines, source.prompt(sizes.before), list(samples))  # a warm-up
    for index in range(rounds):
        say(f"prefill, round {index + 1}/{rounds}")
        first = index % len(samples)
        order = [*samples][first:] + [*samples][:first]
        for key, seconds in _round(engines, source.prompt(sizes.before), order).items():
            samples[key].append(seconds)
    return summarize(samples, RATIOS)


def _round(engines: Engines, prompt: list[int], order: list[str]) -> dict[str, float]:
    found = {}
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
    for key in (PEER, "all_layers"):
        if key in found:
            verify_same_states(LABELS[key], found["one_layer"]["mean"], found[key]["mean"])
    return {key: result["seconds"] for key, result in found.items()}


def format_table(result: dict[str, Any], sizes: Sizes) -> str:
    return format_times(f"All positions of {sizes.before:,} tokens", LABELS, RATIOS, result)
