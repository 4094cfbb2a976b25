"""Whole engines on the CPU whose small steps are recorded passes give what they give call by call, to the bit."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ratoon import SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.execution import choices
from ratoon.execution.model_runner import ModelRunner
from ratoon.execution.passes.program import StepProgram
from ratoon.execution.passes.recorded_passes import MAX_LOGITS_ROWS
from ratoon.layers.native import library
from ratoon.layers.native.recording import Program
from ratoon.models.base import LanguageModel
from tests import stage_executor
from tests.golden import tiny_models
from tests.golden.engines import engine
from tests.golden.every_kind import PROMPTS, answers
from tests.golden.test_cuda import core_of, greedy, searches, states, texts_over_encoders
from tests.golden.tiny_decoder_models import DECODERS
from tests.golden.tiny_models import random_token_ids
from tests.golden.tiny_states import STATE_MODELS

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels for this processor; `make setup` builds them")

FAMILIES = {
    "llama": tiny_models.tiny_llama,
    "mistral": tiny_models.tiny_mistral,
    "qwen2": tiny_models.tiny_qwen2,
    "qwen3": partial(tiny_models.tiny_qwen3, head_dim=32),
    "gpt2": tiny_models.tiny_gpt2,
    "gemma3": tiny_models.tiny_gemma3,
    **DECODERS,
    **{family: STATE_MODELS[family] for family in ("mamba2", "granite hybrid without experts")},
}


@contextmanager
def engines(recorded: bool) -> Iterator[None]:
    runners: list[ModelRunner] = []

    def make(*arguments: Any, **settings: Any) -> ModelRunner:
        assert settings["record"], "the worker asks for it by itself"
        runners.append(ModelRunner(*arguments, **settings | {"record": recorded}))
        return runners[-1]

    with patch.object(choices, "ModelRunner", make):
        yield
    assert runners
    for runner in runners:
        assert (runner.recorded is not None and len(runner.recorded) > 0) == recorded


def with_and_without(function: Any, *arguments: Any, **settings: Any) -> list[Any]:
    results = []
    for recorded in (False, True):
        with engines(recorded):
            results.append(function(*arguments, **settings))
    return results


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(3)
def test_a_batch_gets_the_same_tokens(family):
    alone, recorded = with_and_without(greedy, FAMILIES[family](), "cpu")
    assert recorded == alone


@pytest.mark.parametrize("num_requests", [3, MAX_LOGITS_ROWS, MAX_LOGITS_ROWS + 4])
def test_a_step_runs_its_pass_once(num_requests):
    counts: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            counts[name] += name != "steps" or arguments[1].total_num_scheduled_tokens > 0
            return function(*arguments, **settings)

        return call

    with ExitStack() as patches:
        for name, owner, method in (
            ("steps", ModelRunner, "execute_model"),
            ("replays", Program, "run"),
            ("passes", LanguageModel, "forward_stream"),
        ):
            patches.enter_context(patch.object(owner, method, counted(name, getattr(owner, method))))
        core = core_of(tiny_models.tiny_llama(), "cpu")
        for index in range(num_requests):
            params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            core.add_request(EngineCoreRequest(str(index), random_token_ids(6, seed=index), params))
        while core.has_work():
            core.step()
    assert counts["replays"] >= 8
    assert counts["replays"] + counts["passes"] == counts["steps"]


def test_a_step_that_checks_drafts_of_a_greedy_answer_ends_in_its_pass():
    """The head and the choice of its tokens are recorded too, however many rows it has."""
    prompt, params = {"prompt_token_ids": PROMPTS[0]}, SamplingParams(temperature=0.0, max_tokens=49, ignore_eos=True)
    with engine("llama with grouped heads", speculate_max_seqs=8) as llm:
        (alone,) = llm.generate(prompt, params, progress=False)
        params.prediction = list(alone.outputs[0].token_ids)
        for _ in range(2):  # the first runs call by call, the second is recorded
            llm.generate(prompt, params, progress=False)
        with patch.object(StepProgram, "finish", autospec=True, side_effect=StepProgram.finish) as finish:
            (drafted,) = llm.generate(prompt, params, progress=False)
        assert drafted.outputs[0].token_ids == alone.outputs[0].token_ids
        assert drafted.metrics.num_accepted_prediction_tokens > 40
        assert finish.call_count <= 1, "that of the prompt"


def test_searches_and_continuations_find_the_same_texts():
    alone, recorded = with_and_without(searches, tiny_models.tiny_qwen2(), "cpu")
    assert recorded == alone


def test_hidden_states_are_the_same():
    alone, recorded = with_and_without(states, tiny_models.tiny_llama(), "cpu")
    assert recorded.keys() == alone.keys()
    assert all(torch.equal(recorded[name], alone[name]) for name in alone)


@pytest.mark.parametrize("family", ["bart", "marian", "whisper", "t5"])
def test_texts_over_encoders_are_the_same_with_little_memory(family):
    with engines(recorded=False):
        expected, _ = texts_over_encoders(family, "cpu", 100)
    with engines(recorded=True):
        found, swapped = texts_over_encoders(family, "cpu", 13, swap_bytes=2**22)
    assert found == expected and swapped


def ask_stages(family: str) -> list[Any]:
    with engine(family, executor=stage_executor.NAME, pipeline_parallel_size=stage_executor.NUM_STAGES) as llm:
        return answers(llm, PROMPTS)


@pytest.mark.parametrize("family", ["llama with grouped heads", "gpt2"])
def test_each_stage_of_a_pipeline_records_its_part(family: str) -> None:
    """What it sends may still be read when its next pass begins (stage_executor.py)."""
    by_calls, recorded = with_and_without(ask_stages, family)
    assert recorded == by_calls
    with engine(family) as llm:
        assert answers(llm, PROMPTS) == recorded
