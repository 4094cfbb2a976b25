"""Engines of state-space and hybrid models: what is shared, forked, preempted and read gives the same answers.

Checkpoints are a few tokens apart, so that short texts pass many of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ratoon.api.llm import LLM
from ratoon.core.errors import ConfigError
from ratoon.core.outputs import TransferReport
from ratoon.core.params import BeamSearchParams, HiddenStatesParams, SamplingParams
from ratoon.core.plan import BlockTransfer, SchedulerOutput
from ratoon.execution.device_kinds import CpuDevice
from ratoon.execution.kv.kv_tensors import KVTensors
from ratoon.layers.native import library
from ratoon.layers.torch_ops import TorchOps
from tests.depths import both_depths
from tests.golden.beam_oracle import oracle_search, texts_of
from tests.golden.driver import Driver
from tests.golden.engines import engine, greedy, oracle_tokens, run, tiny_model, tokens_of
from tests.golden.hidden_oracle import oracle_states
from tests.golden.pressure import step_without_free_memory
from tests.golden.test_batch_independence import REQUESTS, answers, assert_same
from tests.golden.test_continuation import afresh, num_computed, whole
from tests.golden.test_mixtures import check_hidden_states
from tests.golden.tiny_models import random_token_ids
from tests.rank_executor import NAME

MAMBA = "mamba2"
HYBRID = "granite hybrid without experts"
FAMILIES = [MAMBA, HYBRID]
PROMPTS = [random_token_ids(length, seed=length) for length in (33, 1, 18)]


@contextmanager
def states(family: str, **settings: Any) -> Iterator[LLM]:
    with engine(family, **{"block_size": 4, "state_interval": 8, "num_blocks": 400, **settings}) as llm:
        yield llm
        llm.reset_prefix_cache()  # and with it, leases end


@pytest.mark.parametrize("family", [*FAMILIES, "granite hybrid with experts"])
@pytest.mark.one_in(2)
def test_long_answers_of_an_engine_are_those_of_transformers(family: str) -> None:
    with engine(family, state_interval=16) as llm:
        assert (library() is None) == ("torch states" in llm.describe()["attention_backend"])
        outputs = run(llm, PROMPTS, greedy(64, logprobs=2, prompt_logprobs=0))
        assert tokens_of(outputs) == [oracle_tokens(family, prompt, 64) for prompt in PROMPTS]
        check_hidden_states(llm, family)
        for prompt, output in zip(PROMPTS, outputs):
            sequence = prompt + list(output.outputs[0].token_ids)
            wanted = tiny_model(family).oracle_logits(sequence).log_softmax(-1)
            assert output.outputs[0].logprobs is not None
            for place, row in enumerate(output.outputs[0].logprobs, len(prompt)):
                assert abs(row[sequence[place]].logprob - float(wanted[place - 1, sequence[place]])) < 1e-4


@both_depths
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(3)
def test_prompts_in_chunks_and_prefixes_that_are_found_give_the_same_answers(family: str) -> None:
    with states(family, max_num_batched_tokens=7) as llm:
        expected = [oracle_tokens(family, prompt, 20) for prompt in PROMPTS]
        assert tokens_of(run(llm, PROMPTS, greedy(20))) == expected
        again = run(llm, PROMPTS, greedy(20))
        assert tokens_of(again) == expected
        assert [output.num_cached_tokens for output in again] == [32, 0, 16]
        longer = PROMPTS[0] + expected[0]  # into what was generated: at the last checkpoint before its end
        (found,) = run(llm, [longer], greedy(5))
        assert found.num_cached_tokens == 48 and tokens_of([found])[0] == oracle_tokens(family, longer, 5)
        other = [*PROMPTS[0][:30], 3, 1, 4]
        (found,) = run(llm, [other], greedy(5))
        assert found.num_cached_tokens == 24 and tokens_of([found])[0] == oracle_tokens(family, other, 5)


@pytest.mark.skipif(library() is None, reason="torch's sums depend on the batch")
@pytest.mark.parametrize("family", FAMILIES)
def test_batches_chunks_prefixes_and_checkpoints_change_no_bit(family: str) -> None:
    requests, expected = [*REQUESTS[1::4], *REQUESTS[-3:]], []
    with states(family, block_size=16, state_interval=16, batch_invariant=True) as llm:
        for request in requests:
            assert llm.reset_prefix_cache()
            expected += answers(llm, [request])
    with states(family, block_size=16, state_interval=32, max_num_batched_tokens=11) as llm:
        assert_same(answers(llm, requests), expected)
        hits = llm.stats().prefix_cache.hits
        assert_same(answers(llm, requests[::-1]), expected[::-1])
        assert llm.stats().prefix_cache.hits > hits


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_of_one_step_do_not_read_states_that_it_writes(family: str) -> None:
    """Equal prompts that come together: keys and values of the first are there for the others, states are not."""
    with states(family) as llm:
        outputs = run(llm, [PROMPTS[0]] * 3, greedy(12))
        assert tokens_of(outputs) == [oracle_tokens(family, PROMPTS[0], 12)] * 3
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]


@both_depths
@pytest.mark.parametrize("family", FAMILIES)
def test_choices_and_continuations_go_on_from_states_of_their_own(family: str) -> None:
    params, several = greedy(6), SamplingParams(temperature=1, seed=3, n=3, max_tokens=7, ignore_eos=True)
    with states(family) as llm:
        (parent,) = llm.generate(random_token_ids(9, seed=1), several, retain_kv=60, progress=False)
        before = num_computed(llm)
        children = [llm.generate_continuation(parent, [5], params, choice=choice) for choice in range(3)]
        assert num_computed(llm) - before == 3 * (2 + params.max_tokens - 1)  # the last token, the suffix, the answer
        assert [child.continuation.source for child in children] == ["lease"] * 3
        early = {at: llm.generate_continuation(parent, [5, 6], params, choice=2, at=at) for at in (1, 7, 8, 9, 15, 16)}
        # From a checkpoint: the nearest one before the token. What the parent holds itself is its last state
        assert [child.continuation.inherited_tokens for child in early.values()] == [0, 0, 8, 8, 15, 15]
        for choice, child in enumerate(children):
            assert tokens_of([child])[0] == afresh(llm, [*whole(parent, choice), 5], params)
        for at, child in early.items():
            assert tokens_of([child])[0] == afresh(llm, [*whole(parent, 2)[:at], 5, 6], params), at


@both_depths
@pytest.mark.parametrize("family", FAMILIES)
def test_a_parent_that_ended_while_a_step_was_in_flight_is_taken_up_at_its_last_checkpoint(family: str) -> None:
    prompt = random_token_ids(13, seed=4)
    answer = oracle_tokens(family, prompt, 8)
    stop = next(token for token in answer[2:] if token not in answer[:2])
    ends = greedy(20)
    ends.stop_token_ids = [stop]
    with states(family) as llm:
        (parent,) = llm.generate(prompt, ends, retain_kv=60, progress=False)
        assert parent.outputs[0].finish_reason == "stop"
        child = llm.generate_continuation(parent, [5, 6], greedy(6))
        num_tokens = len(whole(parent))
        assert child.continuation.inherited_tokens >= (num_tokens - 1) // 8 * 8
        assert tokens_of([child])[0] == oracle_tokens(family, [*whole(parent), 5, 6], 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_have_states_of_their_own(family: str) -> None:
    params = BeamSearchParams(beam_width=4, n=4, max_tokens=12, ignore_eos=True)
    with states(family) as llm:
        for length in (13, 16):  # within a block, and at the end of one
            prompt = random_token_ids(length, seed=length)
            (found,) = llm.beam_search([prompt], params)
            wanted = oracle_search(tiny_model(family).oracle, prompt, params, None)
            assert [text.token_ids for text in texts_of(found)] == [text.token_ids for text in wanted]
            np.testing.assert_allclose(
                [text.score for text in texts_of(found)], [text.score for text in wanted], atol=1e-4
            )


@both_depths
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("swap_memory", [0, "4MiB"])
@pytest.mark.one_in(3)
def test_preempted_requests_go_on_from_what_was_saved_or_from_a_checkpoint(
    family: str, swap_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what no sequence holds is overwritten after every step."""
    loaded: list[BlockTransfer] = []
    move_blocks = KVTensors.move_blocks

    def count(self: KVTensors, plan: SchedulerOutput) -> TransferReport | None:
        loaded.extend(plan.loads)
        return move_blocks(self, plan)

    monkeypatch.setattr(KVTensors, "move_blocks", count)
    # A sequence whose states are all it has frees one for each that it takes, once it holds two: these are short.
    prompts = PROMPTS if family == HYBRID else [random_token_ids(length, seed=length) for length in (3, 2, 5)]
    with states(family, swap_memory=swap_memory) as llm:
        driver = Driver(llm)
        ids = [driver.add(prompt, greedy(64)) for prompt in prompts]
        driver.step()
        assert any(step_without_free_memory(llm) for _ in range(20))  # at the end of a block, for one of them
        found = [list(driver.result(request_id).outputs[0].token_ids) for request_id in ids]
        assert found == [oracle_tokens(family, prompt, 64) for prompt in prompts]
        assert bool(loaded) == bool(swap_memory)


@both_depths
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_of_an_ended_text_cost_what_is_behind_a_checkpoint(family: str) -> None:
    with states(family) as llm:
        (parent,) = llm.generate(PROMPTS[0], greedy(9), retain_kv=60, progress=False)
        text = whole(parent)
        wanted = oracle_states(family, text)
        for position, most in ((len(text) - 1, 1), (20, 5), (16, 1)):
            before = num_computed(llm)
            params = HiddenStatesParams(layers=[2, -1], positions=[position])
            (found,) = llm.extract_hidden_states([parent], params, progress=False)
            assert num_computed(llm) - before <= most
            np.testing.assert_allclose(found.tensor[:, 0].numpy(), wanted[[2, -1], position], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_answer_as_one_worker(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "make_ops", lambda *arguments: TorchOps())  # ranks are threads here
    with states(family, executor=NAME, attention_backend="torch") as llm:
        outputs = run(llm, PROMPTS, greedy(12))
        assert tokens_of(outputs) == [oracle_tokens(family, prompt, 12) for prompt in PROMPTS]


def test_settings_that_a_model_with_states_rules_out_are_refused() -> None:
    message = "speculate: drafts can't be taken back from a model with states"
    with pytest.raises(ConfigError, match=message), engine(MAMBA, speculate="ngram"):
        pass
    message = "state_interval: 24 is no multiple of block_size"
    with pytest.raises(ConfigError, match=message), engine(MAMBA, state_interval=24):
        pass
