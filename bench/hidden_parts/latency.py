"""The states of the last token of a finished request: read from its lease, against one decode step there, and against
computing the whole text again.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

from cpu_peers import OURS
from peers.process import EngineFailedError
from workloads import PromptSource

from hidden_parts.agreement import verify_same_states
from hidden_parts.sizes import Engines, Say, Sizes
from hidden_parts.tables import Ratio, format_times, summarize

PEER = "transformers"
LABELS = {
    "read": "last-token states of a leased request",
    "decode_step": "one decode step after it",
    "second_prefill": "the same states by a second prefill",
    PEER: "transformers, output_hidden_states=True",
}
RATIOS = {
    "in_steps": Ratio("reading them, in decode steps", "read", "decode_step", "at most 2"),
    "saved": Ratio("a second prefill against reading them", "second_prefill", "read"),
    PEER: Ratio("transformers against reading them", PEER, "read"),
}


def measure(engines: Engines, source: PromptSource, sizes: Sizes, rounds: int, say: Say) -> dict[str, Any]:
    samples: dict[str, list[float]] = {key: [] for key in LABELS if key != PEER or PEER in engines}
    engines[OURS].call("prepare", prompt=source.prompt(sizes.decode_tokens))  # a warm-up
    engines[OURS].call("read_last", repeats=1)
    if PEER in engines:
        engines[PEER].call("hidden_states", prompt=source.prompt(sizes.before))
    for index in range(rounds):
        say(f"latency, round {index + 1}/{rounds}")
        for key, value in _round(engines, source, sizes).items():
            samples[key].append(value)
    return summarize(samples, RATIOS)


def _round(engines: Engines, source: PromptSource, sizes: Sizes) -> dict[str, float]:
    ours = engines[OURS]
    text = ours.call("prepare", prompt=source.prompt(sizes.before - 1)).value  # and a token that it generates
    read = ours.call("read_last", repeats=sizes.repeats).value
    if read["computed_tokens"] != [1] * sizes.repeats:
        raise EngineFailedError(f"{read['computed_tokens']} rows were run for the last token's states, not 1")
    decoded = ours.call("decode_behind", suffix=source.prompt(1), num_tokens=sizes.decode_tokens).value
    computed = ours.call("read_prompt", prompt=text, positions=-1).value
    verify_same_states("a second prefill", read["last"], computed["last"])
    found = {
        "read": statistics.median(read["times"]),
        "decode_step": statistics.median(later - earlier for earlier, later in pairwise(decoded["times"])),
        "second_prefill": computed["seconds"],
    }
    if PEER in engines:
        theirs = engines[PEER].call("hidden_states", prompt=text)
        verify_same_states(PEER, read["last"], theirs.value["last"])
        found[PEER] = theirs.value["seconds"]
    return found


def format_table(result: dict[str, Any], sizes: Sizes) -> str:
    return format_times(f"The last token of {sizes.before:,}", LABELS, RATIOS, result)
