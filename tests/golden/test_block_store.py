"""Prefixes that left the KV cache are loaded from host memory: answers are the same to the bit as computed ones."""

from __future__ import annotations

from typing import Any

import pytest

from ratoon import LLM, SamplingParams
from ratoon.core.outputs import RequestOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.execution.kv.kv_tensors import KVTensors
from tests.depths import both_depths
from tests.golden.engines import engine
from tests.golden.tiny_models import random_token_ids

FAMILIES = ["llama with grouped heads", "mistral with a window wider than a block"]
PREFIX = random_token_ids(64, seed=5)  # four blocks
PROMPTS = [[*PREFIX, *random_token_ids(5, seed)] for seed in (1, 2)]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True, logprobs=2)


def ask(llm: LLM, prompt: list[int]) -> RequestOutput:
    (output,) = llm.generate([{"prompt_token_ids": prompt}], PARAMS, use_tqdm=False)
    assert output.error is None
    return output


def answer_of(output: RequestOutput) -> Any:
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def evict_all(llm: LLM) -> None:
    """Other prompts take all blocks."""
    for seed in range(10, 14):
        ask(llm, random_token_ids(80, seed))


@both_depths
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_prefix_gives_the_same_bits_as_a_computed_one(family: str) -> None:
    with engine(family, enable_prefix_caching=False) as llm:
        expected = [answer_of(ask(llm, prompt)) for prompt in PROMPTS]
    with engine(family, num_blocks=14, swap_memory="1MiB") as llm:
        assert answer_of(ask(llm, PROMPTS[0])) == expected[0]
        evict_all(llm)
        output = ask(llm, PROMPTS[1])
        assert answer_of(output) == expected[1]
        assert output.num_cached_tokens == len(PREFIX) and llm.stats().store.loaded >= 2, "a window needs its own"


@both_depths
def test_blocks_that_fail_to_arrive_are_computed_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    move_blocks = KVTensors.move_blocks

    def lose_one(self: KVTensors, plan: SchedulerOutput) -> Any:
        report = move_blocks(self, plan)
        if report is not None and len(report.loaded) > 2:
            lost = report.loaded.pop(2)
            report.failed_loads.append(lost)
            for tensor in self._tensors:
                tensor[lost] = -1
        return report

    with engine(FAMILIES[0], enable_prefix_caching=False) as llm:
        expected = answer_of(ask(llm, PROMPTS[1]))
    monkeypatch.setattr(KVTensors, "move_blocks", lose_one)
    with engine(FAMILIES[0], num_blocks=14, swap_memory="1MiB") as llm:
        ask(llm, PROMPTS[0])
        evict_all(llm)
        output = ask(llm, PROMPTS[1])
        assert answer_of(output) == expected
        assert output.num_cached_tokens == 32 and llm.stats().store.failed == 1
