"""A model whose layers are divided among stages answers as one worker does, requests of every kind, and to the bit
where each stage has one rank: what passes from stage to stage is what passes from layer to layer."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("workers in processes need Linux", allow_module_level=True)

from ratoon import LLM, HiddenStatesParams, RequestOutput, SamplingParams
from ratoon.core.errors import ConfigError, DeviceLostError
from ratoon.core.plan import SchedulerOutput
from ratoon.distributed.multiproc import MultiprocExecutor
from tests.golden.engines import check_nothing_left, engine, model_folder
from tests.golden.every_kind import answers
from tests.golden.grammar_engines import forced_texts
from tests.golden.marks import exact_on_cpu
from tests.golden.test_encoder_decoder_api import INPUTS, folder_of
from tests.golden.test_encoder_decoder_api import engine as encoder_engine
from tests.golden.test_steps_in_flight import AFTERWARDS, EVERYTHING, LLAMA, SUFFIX, TWO_GROUPS, all_of, ask
from tests.golden.test_worker_processes import PROMPTS, is_running
from tests.waiting import wait_until

STAGES = {"pipeline_parallel_size": 2}
SQUARE = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}


def executor_of(llm: LLM) -> MultiprocExecutor:
    executor = llm._client.core.executor
    assert isinstance(executor, MultiprocExecutor)
    return executor


@contextmanager
def watched(llm: LLM) -> Iterator[list[list[SchedulerOutput]]]:
    """The plans that were in flight together, each time that one was submitted."""
    core, seen = llm._client.core, []
    submit = core.executor.submit

    def note(plan: SchedulerOutput) -> Any:
        seen.append([*(flying for flying, _ in core._in_flight), plan])
        return submit(plan)

    core.executor.submit = note
    try:
        yield seen
    finally:
        core.executor.submit = submit


@cache
def served(family: str, **settings: Any) -> dict[str, Any]:
    """Of requests that end by length, token and string, some with several choices, beams or hidden states, of what
    continues them, and of extractions."""
    with engine(family, num_blocks=300, skip_tokenizer=False, **settings) as llm:
        parents = ask(llm, retain_kv=60)
        extracted = [llm.extract_hidden_states(parent, EVERYTHING, progress=False) for parent in parents]
        children: list[RequestOutput] = [
            llm.generate_continuation(parent, SUFFIX, params, choice=choice.index)
            for params in AFTERWARDS
            for parent in parents[:4]
            for choice in parent.outputs
        ]
        assert llm.reset_prefix_cache()
    return {
        "answers": [all_of(parent) for parent in parents],
        "hidden states": [(one.source, one.tensor.numpy().tobytes()) for one in extracted],
        "continuations": [all_of(child) for child in children],
        "leases": [
            (one.continuation.source, one.continuation.inherited_tokens) for one in children if one.continuation
        ],
    }


@exact_on_cpu
@pytest.mark.parametrize("family", [LLAMA, pytest.param(TWO_GROUPS, marks=pytest.mark.full)])
def test_answers_continuations_and_hidden_states_are_those_of_one_worker(family: str) -> None:
    right = served(family, max_steps_in_flight=1)
    for what, found in served(family, **STAGES).items():
        assert found == right[what], what


@exact_on_cpu
@pytest.mark.parametrize("swap_memory", [0, "1MiB"], ids=["recomputed", "swapped"])
def test_stages_with_different_groups_agree_where_memory_is_short(swap_memory: int | str) -> None:
    """The layers of one stage have a window, those of the other have none: block tables have both groups on each."""
    settings: dict[str, Any] = {"num_blocks": 26, "swap_memory": swap_memory, "skip_tokenizer": False}
    with engine(TWO_GROUPS, max_num_batched_tokens=40, **settings, **STAGES) as llm:
        assert [all_of(output) for output in ask(llm)] == served(TWO_GROUPS, max_steps_in_flight=1)["answers"]
        assert llm.stats().num_preemptions > 0


@exact_on_cpu
def test_structured_output_is_that_of_one_worker() -> None:
    assert forced_texts(others=True, **STAGES).answers == forced_texts(others=True).answers


@exact_on_cpu
def test_quantised_weights_give_the_answers_of_one_worker() -> None:
    settings: dict[str, Any] = {"quantization": "int8"}
    with engine(LLAMA, **settings) as llm:
        right = answers(llm, PROMPTS)
    with engine(LLAMA, **settings, **STAGES) as llm:
        assert answers(llm, PROMPTS) == right


@pytest.mark.parametrize("family", ["bart", pytest.param("t5", marks=pytest.mark.full)])
def test_a_model_with_an_encoder_answers_and_shows_both_sides_states(family: str) -> None:
    of_encoder = HiddenStatesParams(positions="all", layers="all", side="encoder")

    def ask_all(**settings: Any) -> list[Any]:
        with encoder_engine(family, **settings) as llm:
            found = answers(llm, INPUTS[:3])
            (parent,) = llm.generate(INPUTS[:1], SamplingParams(temperature=0, max_tokens=5), retain_kv=60)
            found.append(llm.generate_continuation(parent, SUFFIX, SamplingParams(max_tokens=4)).outputs[0].token_ids)
            for params in (EVERYTHING, of_encoder):
                found.append(llm.extract_hidden_states(INPUTS[1], params).tensor.numpy().tobytes())
            assert llm.reset_prefix_cache()
            return found

    assert ask_all(**STAGES) == ask_all()


def test_vectors_are_those_of_one_worker() -> None:
    with engine(LLAMA) as llm:
        right = [output.outputs.embedding.tolist() for output in llm.embed(PROMPTS)]
    with engine(LLAMA, **STAGES) as llm:
        assert [output.outputs.embedding.tolist() for output in llm.embed(PROMPTS)] == right


@pytest.mark.parametrize("family", [LLAMA, pytest.param("bart", marks=pytest.mark.full)])
def test_stages_of_several_ranks_answer_as_one_worker(family: str) -> None:
    folder, prompts = (folder_of("bart"), INPUTS[:3]) if family == "bart" else (model_folder(family), PROMPTS)
    settings: dict[str, Any] = {"device": "cpu", "num_threads": 1, "skip_tokenizer": True, "num_blocks": 96}
    with LLM(str(folder), **settings) as llm:
        right = answers(llm, prompts)
        states = llm.extract_hidden_states(prompts[0], EVERYTHING).tensor
    with LLM(str(folder), **settings, **SQUARE) as llm:
        assert answers(llm, prompts) == right
        assert llm.extract_hidden_states(prompts[0], EVERYTHING).tensor == pytest.approx(states, abs=1e-5)
        llm.sleep(2)
        llm.wake_up()
        assert answers(llm, prompts) == right
        check_nothing_left(llm)


def test_each_stage_has_steps_of_other_branches_and_its_own_layers_memory() -> None:
    with engine(LLAMA) as llm:
        whole = llm._client.core.executor.facts
    with engine(LLAMA, **STAGES) as llm, watched(llm) as seen:
        llm.generate(PROMPTS * 2, SamplingParams(max_tokens=12, ignore_eos=True), progress=False)
        facts = executor_of(llm).facts
    decodes = [plans for plans in seen if len(plans) == 2 and not any(plan.scheduled_new_reqs for plan in plans)]
    assert len(decodes) > 10, "two steps are in flight, one for each stage"
    for first, second in (plans for plans in decodes if all(plan.req_ids for plan in plans)):
        assert not set(first.req_ids) & set(second.req_ids), "a branch's next step needs its token"
        assert {len(first.req_ids), len(second.req_ids)} == {len(PROMPTS)}, "branches are spread evenly"
    assert facts.kv_config.bytes_per_block < whole.kv_config.bytes_per_block
    assert facts.kv_bytes == whole.kv_bytes, "together the stages hold what one worker does"


def test_a_stage_that_is_killed_ends_the_executor_and_all_workers() -> None:
    before = set(os.listdir("/dev/shm"))
    for rank in (0, 1):
        with LLM(str(model_folder(LLAMA)), device="cpu", num_blocks=96, skip_tokenizer=True, **STAGES) as llm:
            pids = [worker.pid for worker in executor_of(llm)._workers]
            os.kill(pids[rank], signal.SIGKILL)
            with pytest.raises(DeviceLostError, match=rf"worker {rank} has (ended|closed its socket)"):
                llm.generate(PROMPTS, SamplingParams(max_tokens=90, ignore_eos=True), progress=False)
        wait_until("all workers have ended", lambda pids=pids: not any(map(is_running, pids)))
    assert set(os.listdir("/dev/shm")) <= before


def test_stages_that_can_not_be_made_are_refused_before_anything_is_started() -> None:
    settings: dict[str, Any] = {"device": "cpu", "skip_tokenizer": True}
    with pytest.raises(ConfigError, match="pipeline_parallel_size: 9 stages can't be made of 3 layers; at most 3"):
        LLM(str(model_folder(LLAMA)), pipeline_parallel_size=9, **settings)
    with pytest.raises(ConfigError, match="pipeline_parallel_size: 0 is out of range"):
        LLM(str(model_folder(LLAMA)), pipeline_parallel_size=0, **settings)
    with pytest.raises(ConfigError, match="executor: uniproc has one worker, and pipeline_parallel_size is 2"):
        LLM(str(model_folder(LLAMA)), executor="uniproc", **STAGES, **settings)
