"""A beam search that gives way keeps its prompt on the host where there is room, and finds the texts that it finds
undisturbed."""

from __future__ import annotations

from transformers.generation.logits_process import LogitsProcessorList, NoRepeatNGramLogitsProcessor

from ratoon import LLM, BeamSearchParams
from tests.golden.beam_oracle import assert_same_texts, oracle_search, texts_of
from tests.golden.engines import engine, scheduler_of, tiny_model
from tests.golden.pressure import step_without_free_memory
from tests.golden.tiny_models import random_token_ids

FAMILY = "llama with grouped heads"
PROMPT = random_token_ids(40, seed=3)
SEARCH = BeamSearchParams(beam_width=3, n=3, max_tokens=12, ignore_eos=True, no_repeat_ngram_size=2)


def search_and_give_way(llm: LLM) -> tuple[int, bool]:
    """How many tokens were computed in all, and whether something of the search was on the host."""
    runner = llm._client.core.executor._worker.runner
    before = runner.num_computed_tokens
    stream = llm.stream(PROMPT, SEARCH)
    outputs = [next(stream) for _ in range(9)]  # the tenth token begins a block: 40 + 9 - 1 is 48
    (trunk,) = scheduler_of(llm).roster.branches.values()
    assert step_without_free_memory(llm)
    was_swapped = scheduler_of(llm).kv_cache.is_swapped(trunk)
    outputs += stream
    rules = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])
    theirs = oracle_search(tiny_model(FAMILY).oracle, PROMPT, SEARCH, None, rules)
    assert_same_texts(texts_of(outputs[-1]), theirs, PROMPT)
    return runner.num_computed_tokens - before, was_swapped


def test_a_prompt_that_was_on_the_host_is_not_computed_again_but_for_its_last_token() -> None:
    with engine(FAMILY, enable_prefix_caching=False) as llm:
        all_again, was_swapped = search_and_give_way(llm)
        assert not was_swapped
    with engine(FAMILY, enable_prefix_caching=False, swap_memory="1MiB") as llm:
        with_host, was_swapped = search_and_give_way(llm)
        assert was_swapped
        assert llm.stats().num_preemptions == 1
    assert all_again - with_host == len(PROMPT) - 1


def test_a_search_that_waits_on_the_host_can_be_taken_back() -> None:
    with engine(FAMILY, swap_memory="1MiB") as llm:
        stream = llm.stream(PROMPT, SEARCH)
        for _ in range(9):
            next(stream)
        assert step_without_free_memory(llm)
        stream.close()
        scheduler_of(llm).check()
