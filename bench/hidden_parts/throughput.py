"""Generation while some requests, or all, ask for the states of their last token with `return_hidden_states`.

The prompts of a round are the same for all shares, and so must be the answers, token for token.
"""

from __future__ import annotations

from typing import Any

from cpu_peers import OURS, format_spread, spread
from peers.process import EngineFailedError
from workloads import PromptSource

from hidden_parts.sizes import Engines, Say, Sizes

AIMS = {20: 0.95, 100: 0.80}  # per cent of requests → of the throughput without


def measure(engines: Engines, source: PromptSource, sizes: Sizes, rounds: int, say: Say) -> dict[str, Any]:
    samples: dict[int, list[float]] = {share: [] for share in sizes.shares}
    _round(engines, source, sizes, sizes.shares, 2)  # a warm-up: the same shapes, short answers
    for index in range(rounds):
        say(f"throughput, round {index + 1}/{rounds}")
        first = index % len(sizes.shares)
        for share, rate in _round(engines, source, sizes, sizes.shares[first:] + sizes.shares[:first]).items():
            samples[share].append(rate)
    without = samples[sizes.shares[0]]
    return {
        "samples": samples,
        "tokens_per_second": {share: spread(rates) for share, rates in samples.items()},
        "ratios": {
            share: spread([rate / base for rate, base in zip(rates, without)])
            for share, rates in samples.items()
            if share != sizes.shares[0]
        },
    }


def _round(
    engines: Engines, source: PromptSource, sizes: Sizes, shares: tuple[int, ...], most_tokens: int | None = None
) -> dict[int, float]:
    """Output tokens ÷ wall time, prefill included, by share."""
    prompts = [source.prompt(sizes.input) for _ in range(sizes.requests)]
    lengths = [length if most_tokens is None else min(length, most_tokens) for length in sizes.outputs]
    rates: dict[int, float] = {}
    answers: list[list[int]] | None = None
    for share in shares:
        asking = spread_evenly(share, sizes.requests)
        found = engines[OURS].call("generate_with_states", prompts=prompts, lengths=lengths, asking=asking).value
        if found["rows"] != [1] * len(asking):
            raise EngineFailedError(f"{found['rows']} rows were run for {len(asking)} last tokens")
        if answers is not None and found["token_ids"] != answers:
            raise EngineFailedError(f"with {share} % of the requests asking for states, answers are others")
        answers = found["token_ids"]
        rates[share] = sum(lengths) / found["seconds"]
    return rates


def spread_evenly(share: int, count: int) -> list[int]:
    """Which of `count` requests ask, so that they are `share` per cent of them: 20 is every fifth."""
    return [index for index in range(count) if (index + 1) * share // 100 > index * share // 100]


def format_table(result: dict[str, Any], sizes: Sizes) -> str:
    lengths = f"{sizes.input} tokens in, {sizes.shortest_output} to {sizes.longest_output} out"
    lines = [f"{sizes.requests} requests at once, {lengths}; last-token states for a share of them, tok/s"]
    for share, rates in result["tokens_per_second"].items():
        line = f"  {f'{share} %':<8}{format_spread(rates):<24}"
        if share in result["ratios"]:
            line += f"{format_spread(result['ratios'][share], '×')} of without"
            line += f"; the aim is at least {AIMS[share]:g}" if share in AIMS else ""
        lines.append(line.rstrip())
    return "\n".join(lines)
