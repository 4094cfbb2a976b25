"""A preempted beam search keeps its beams on the host if there is room, or its prompt, and finds the texts that
it finds undisturbed."""

from __future__ import annotations

import pytest
from transformers.generation.logits_process import LogitsProcessorList, NoRepeatNGramLogitsProcessor

from ratoon import LLM, BeamSearchParams
from ratoon.core.outputs import RequestOutput
from tests.depths import both_depths
from tests.golden.beam_oracle import assert_same_texts, oracle_search, texts_of
from tests.golden.engines import engine, scheduler_of, tiny_model
from tests.golden.pressure import step_without_free_memory
from tests.golden.tiny_models import random_token_ids

FAMILY = "llama with grouped heads"
WINDOWED = "mistral with a window wider than a block"
PROMPT = random_token_ids(40, seed=3)
SEARCH = BeamSearchParams(beam_width=3, n=3, max_tokens=12, ignore_eos=True, no_repeat_ngram_size=2)


def search_and_preempt(llm: LLM, family: str) -> tuple[int, bool, bool, list[tuple[list[int], float]]]:
    """How many tokens were computed in all, whether the search was on the host, and with its beams, and its texts with
    their scores."""
    runner = llm._client.core.executor._worker.runner
    before = runner.num_computed_tokens
    stream = llm.stream(PROMPT, SEARCH)
    outputs = [next(stream) for _ in range(9)]  # the tenth token begins a block: 40 + 9 - 1 is 48
    (trunk,) = scheduler_of(llm).state.branches.values()
    assert step_without_free_memory(llm)
    kv_cache = scheduler_of(llm).kv_cache
    was_swapped, had_beams = kv_cache.is_swapped(trunk), kv_cache.num_tail_tokens(trunk) > 0
    outputs += stream
    assert llm.stats().num_preemptions == 1 and kv_cache.num_free_slots == kv_cache.num_slots
    rules = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])
    theirs = oracle_search(tiny_model(family).oracle, PROMPT, SEARCH, None, rules)
    assert_same_texts(texts_of(outputs[-1]), theirs, PROMPT)
    return runner.num_computed_tokens - before, was_swapped, had_beams, texts_and_scores(outputs[-1])


def texts_and_scores(output: RequestOutput) -> list[tuple[list[int], float | None]]:
    return [(text.token_ids, text.cumulative_logprob) for text in output.outputs]


@both_depths
@pytest.mark.parametrize("family", [FAMILY, WINDOWED])
def test_beams_that_were_on_the_host_end_with_the_same_texts_and_scores_to_the_bit(family: str) -> None:
    with engine(family, enable_prefix_caching=False) as llm:
        undisturbed = texts_and_scores(list(llm.stream(PROMPT, SEARCH))[-1])
        all_again, was_swapped, _, texts = search_and_preempt(llm, family)
        assert not was_swapped and texts == undisturbed
        block = llm._client.core.executor._worker.runner.kv._config.bytes_per_block
    # Three blocks hold the prompt, and nothing of the beams.
    with engine(family, enable_prefix_caching=False, swap_memory=3 * block) as llm:
        with_prompt, was_swapped, had_beams, texts = search_and_preempt(llm, family)
        assert was_swapped and not had_beams and texts == undisturbed
    with engine(family, enable_prefix_caching=False, swap_memory="1MiB") as llm:
        with_beams, was_swapped, had_beams, texts = search_and_preempt(llm, family)
        assert was_swapped and had_beams and texts == undisturbed
    assert all_again - with_prompt == len(PROMPT) - 1
    # The prompt's last token, and of each beam the eight that it had computed
    assert with_prompt - with_beams == 1 + 3 * 8


@both_depths
def test_a_search_that_waits_on_the_host_can_be_taken_back() -> None:
    with engine(FAMILY, swap_memory="1MiB") as llm:
        stream = llm.stream(PROMPT, SEARCH)
        for _ in range(9):
            next(stream)
        assert step_without_free_memory(llm)
        stream.close()
        scheduler_of(llm).check()
