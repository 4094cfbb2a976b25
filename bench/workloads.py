"""The work that engines are compared on, as data: which prompts, how many tokens, and what the times say.

Nothing here runs an engine. Every prompt is new and begins with a token that no other prompt begins with, so that a
prefix cache finds only what a workload wants it to find.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

FIRST_ORDINARY_TOKEN = 17  # SmolLM2: the ids below are special tokens
VOCAB_SIZE = 49152


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens."""

    input: int = 128
    output: int = 64
    long_input: int = 1024
    suffix: int = 16
    search_input: int = 700
    search_output: int = 3
    search_width: int = 32  # beams
    most_requests: int = 32  # cuts many-8 and many-32 down

    def within(self, context: int) -> Sizes:
        """Returns sizes with which a prompt and its answer fit a context of this many tokens in every workload."""
        output, suffix = min(self.output, context // 2), min(self.suffix, context // 4)
        return replace(
            self,
            input=min(self.input, context - output),
            output=output,
            long_input=min(self.long_input, context - suffix - 1),
            suffix=suffix,
            search_input=min(self.search_input, context - self.search_output),
        )


TINY = Sizes(8, 8, long_input=32, suffix=4, search_input=16, search_width=4, most_requests=2)


@dataclass(frozen=True)
class Call:
    """One call of an engine: all prompts at once, `num_tokens` greedy tokens for each; or, of one prompt, a beam search
    of a width."""

    prompts: list[list[int]]
    num_tokens: int
    width: int = 1

    @property
    def num_output_tokens(self) -> int:
        return len(self.prompts) * self.num_tokens


class PromptSource:
    """Random token ids: the same ones in every run with the same seed."""

    def __init__(self, seed: int, vocab_size: int = VOCAB_SIZE) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._num_prompts = 0

    def prompt(self, length: int) -> list[int]:
        first = FIRST_ORDINARY_TOKEN + self._num_prompts % (self._vocab_size - FIRST_ORDINARY_TOKEN)
        self._num_prompts += 1
        return [first, *(self._random.randrange(FIRST_ORDINARY_TOKEN, self._vocab_size) for _ in range(length - 1))]


@dataclass(frozen=True)
class Figure:
    """What a workload yields, for the table."""

    label: str
    unit: str
    higher_is_better: bool

    def advantage(self, ours: float, theirs: float) -> float:
        """How many times faster we are: above 1 is good, for rates and for times."""
        return ours / theirs if self.higher_is_better else theirs / ours


@dataclass(frozen=True)
class Workload:
    plan: Callable[[PromptSource, Sizes], list[Call]]
    figures: dict[str, Figure]  # by key, in the order of the table
    evaluate: Callable[[list[Call], list[float]], list[float]]  # calls and their seconds → values of the figures


def plan_single(source: PromptSource, sizes: Sizes) -> list[Call]:
    return [Call([source.prompt(sizes.input)], 1), Call([source.prompt(sizes.input)], sizes.output)]


def evaluate_single(calls: list[Call], seconds: list[float]) -> list[float]:
    """Decoding is what the whole answer takes beyond the first token, which another prompt of this length has timed."""
    whole = calls[1].num_tokens
    return [(whole - 1) / (seconds[1] - seconds[0]), whole / seconds[1]]


def plan_many(num_requests: int) -> Callable[[PromptSource, Sizes], list[Call]]:
    def plan(source: PromptSource, sizes: Sizes) -> list[Call]:
        return [Call([source.prompt(sizes.input) for _ in range(min(num_requests, sizes.most_requests))], sizes.output)]

    return plan


def plan_prefill(source: PromptSource, sizes: Sizes) -> list[Call]:
    return [Call([source.prompt(sizes.long_input)], 1)]


def plan_shared_prefix(source: PromptSource, sizes: Sizes) -> list[Call]:
    shared = source.prompt(sizes.long_input)
    return [Call([shared + source.prompt(sizes.suffix)], 1) for _ in range(2)]


def plan_search(source: PromptSource, sizes: Sizes) -> list[Call]:
    return [Call([source.prompt(sizes.search_input)], sizes.search_output, sizes.search_width)]


def output_rate(calls: list[Call], seconds: list[float]) -> list[float]:
    return [calls[-1].num_output_tokens / seconds[-1]]


def last_seconds(calls: list[Call], seconds: list[float]) -> list[float]:
    """A call for one token ends with its first token."""
    return [seconds[-1]]


WORKLOADS = {
    "single": Workload(
        plan_single,
        {
            "single-decode": Figure("single: decode", "tok/s", True),
            "single-end-to-end": Figure("single: end to end", "tok/s", True),
        },
        evaluate_single,
    ),
    "many-8": Workload(plan_many(8), {"many-8": Figure("many-8", "tok/s", True)}, output_rate),
    "many-32": Workload(plan_many(32), {"many-32": Figure("many-32", "tok/s", True)}, output_rate),
    "prefill": Workload(plan_prefill, {"prefill": Figure("prefill: TTFT", "s", False)}, last_seconds),
    "shared-prefix": Workload(
        plan_shared_prefix, {"shared-prefix": Figure("shared prefix: TTFT", "s", False)}, last_seconds
    ),
    "beam": Workload(plan_search, {"beam": Figure("beams behind a new prompt", "s", False)}, last_seconds),
}
STARTUP = "startup"  # has no calls: it is timed while the engines start
STARTUP_FIGURE = Figure("start-up to first token", "s", False)
