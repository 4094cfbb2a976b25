"""KV groups whose blocks hold different numbers of tokens give the results of groups of one size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ratoon.api.llm import LLM
from ratoon.core.kv import KVCacheSpec
from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer
from tests.depths import both_depths
from tests.golden.encoder_engines import core_of
from tests.golden.engines import engine, greedy, run
from tests.golden.test_encoder_decoder import ALL_LOGPROBS, ask_all, assert_all_greedy, assert_same_numbers, mixed_batch
from tests.golden.tiny_models import random_token_ids

HYBRID = "qwen2 with windows by layer type"
PROMPTS = [random_token_ids(length, seed=length) for length in (33, 1, 61, 5, 48)]


@contextmanager
def sizes(cross: int = 1, window: int = 1) -> Iterator[None]:
    """Blocks of cross-attention, and of layers with a window, are so many times as long as the setting says."""

    def enlarge(kind: type[Any], factor: int, with_window: bool) -> Any:
        declared = kind.kv_spec

        def kv_spec(self: Any, block_size: int, dtype: str) -> KVCacheSpec:
            is_meant = (self.window is not None) == with_window
            return declared(self, block_size * factor if is_meant else block_size, dtype)

        return kv_spec

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CrossAttentionLayer, "kv_spec", enlarge(CrossAttentionLayer, cross, False))
        patch.setattr(AttentionLayer, "kv_spec", enlarge(AttentionLayer, window, True))
        yield


@pytest.mark.parametrize("family", ["bart", "t5", "whisper"])
@pytest.mark.parametrize("settings", [{}, {"block_size": 5, "num_blocks": 600}, {"max_num_batched_tokens": 7}], ids=str)
@pytest.mark.one_in(5)
def test_cross_attention_in_blocks_of_another_size_gives_the_same_numbers(
    family: str, settings: dict[str, Any]
) -> None:
    batch = mixed_batch(family)
    with sizes(cross=2), core_of(family, **settings) as driver:
        kv_config = driver.core.executor.facts.kv_config
        assert kv_config.cross is not None
        assert kv_config.cross.spec.block_size == 2 * kv_config.groups[0].spec.block_size
        ask_all(driver, batch, count=5, **ALL_LOGPROBS)
        driver.run()
        assert_all_greedy(driver, family, batch, count=5)
        for number, (source, prompt) in enumerate(batch):
            assert_same_numbers(driver, str(number), family, source, prompt)


def answers(llm: LLM) -> list[list[list[int]]]:
    params = [greedy(20), greedy(40), SamplingParams(n=3, seed=1, max_tokens=9, ignore_eos=True), greedy(17), greedy(6)]
    outputs = run(llm, PROMPTS, params)
    searched = llm.beam_search([PROMPTS[0], PROMPTS[4]], BeamSearchParams(beam_width=3, max_tokens=12))
    return [[list(choice.token_ids) for choice in output.outputs] for output in [*outputs, *searched]]


@pytest.mark.one_in(3)
@both_depths
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 24}, {"num_blocks": 30}, {"num_blocks": 30, "swap_memory": "1MiB"}],
    ids=str,
)
@pytest.mark.parametrize("window", [2, 3])
def test_windows_in_blocks_of_another_size_give_the_same_tokens(window: int, settings: dict[str, Any]) -> None:
    with engine(HYBRID, **settings) as llm:
        expected = answers(llm)
    with sizes(window=window), engine(HYBRID, **settings) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected, "with prefixes in the cache"
