"""Vectors of prompts, read out of plans that are written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import PoolingParams
from ratoon.core.plan import CachedRequestData, NewRequestData
from ratoon.execution.readers.pooling import add_rows
from ratoon.models.base import FinalStates
from tests.golden.tiny_encoder_models import tiny_bert
from tests.golden.tiny_models import TinyModel
from tests.unit.execution.test_model_runner import (
    BACKENDS,
    LLAMA,
    NAN_TOKEN,
    OTHER,
    PROMPT,
    TWO_GROUPS,
    Driver,
    poisoned,
    token_of,
)

KINDS = ["last", "mean"]


def pooled_branch(
    driver: Driver, req_id: str, token_ids: list[int], first_block: int, kind: str, **rest: Any
) -> NewRequestData:
    new = driver.new(req_id, token_ids, first_block, **rest)
    new.params = PoolingParams(pooling=kind)
    return new


def vector(output: ModelRunnerOutput, req_id: str = "p") -> np.ndarray:
    tensor = output.pooled[req_id]
    assert (tensor.dtype, tensor.shape) == ("float32", (64,))
    return np.asarray(tensor.view())


@torch.inference_mode()
def oracle_vector(tiny: TinyModel, token_ids: list[int], kind: str) -> np.ndarray:
    states = tiny.oracle.base_model(torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]
    return {"last": states[-1], "first": states[0], "mean": states.mean(dim=0)}[kind].numpy()


def whole(driver: Driver, kind: str, prompt: list[int] = PROMPT) -> np.ndarray:
    branch = pooled_branch(driver, "p", prompt, 1, kind)
    found = vector(driver.step(new=[branch], sampled=[], pooled_req_ids=["p"]))
    driver.step(finished_req_ids=["p"])
    return found


def in_chunks(driver: Driver, kind: str, sizes: list[int]) -> np.ndarray:
    assert sum(sizes) == len(PROMPT)
    output = driver.step(new=[pooled_branch(driver, "p", PROMPT, 1, kind)], counts={"p": sizes[0]}, sampled=[])
    done = sizes[0]
    for size in sizes[1:]:
        assert not output.pooled and not output.errors
        ends = ["p"] if done + size == len(PROMPT) else []
        output = driver.step(known={"p": done}, counts={"p": size}, sampled=[], pooled_req_ids=ends)
        done += size
    driver.step(finished_req_ids=["p"])
    return vector(output)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tiny", [LLAMA, TWO_GROUPS], ids=["one group", "two groups"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_is_that_of_the_states_behind_the_final_norm(kind: str, tiny: TinyModel, backend: str) -> None:
    driver = Driver(tiny, backend)
    np.testing.assert_allclose(whole(driver, kind), oracle_vector(tiny, PROMPT, kind), atol=1e-4)
    assert len(driver.runner.pooling) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[36, 1], [1, 36], [5, 5, 16, 11], [1] * 37], ids=str)
def test_the_way_a_prompt_is_cut_into_chunks_does_not_show(kind: str, sizes: list[int]) -> None:
    np.testing.assert_allclose(in_chunks(Driver(), kind, sizes), oracle_vector(LLAMA, PROMPT, kind), atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS[1:2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[36, 1], [1, 36], [5, 5, 16, 11], [1] * 37], ids=str)
def test_with_our_kernels_it_does_not_change_a_bit(kind: str, sizes: list[int], backend: str) -> None:
    driver = Driver(backend=backend)
    assert in_chunks(driver, kind, sizes).tobytes() == whole(driver, kind).tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_step_samples_reads_vectors_out_and_leaves_a_prompt_half_done(backend: str) -> None:
    driver = Driver(backend=backend)
    token = token_of(driver.step(new=[driver.new("a", PROMPT, 1)]), "a")
    driver.step(finished_req_ids=["a"])
    output = driver.step(
        new=[
            pooled_branch(driver, "m", PROMPT, 1, "mean"),
            driver.new("a", PROMPT, 7),
            pooled_branch(driver, "l", OTHER, 13, "last"),
            pooled_branch(driver, "h", PROMPT, 19, "mean"),
        ],
        counts={"m": 37, "a": 37, "l": 21, "h": 11},
        sampled=["a"],
        pooled_req_ids=["l", "m"],
    )
    assert token_of(output, "a") == token
    assert set(output.pooled) == {"l", "m"}
    np.testing.assert_allclose(vector(output, "m"), oracle_vector(LLAMA, PROMPT, "mean"), atol=1e-4)
    np.testing.assert_allclose(vector(output, "l"), oracle_vector(LLAMA, OTHER, "last"), atol=1e-4)
    output = driver.step(known={"h": 11, "a": 37}, counts={"h": 26, "a": 1}, sampled=["a"], pooled_req_ids=["h"])
    np.testing.assert_allclose(vector(output, "h"), oracle_vector(LLAMA, PROMPT, "mean"), atol=1e-4)


def test_the_last_state_can_stand_behind_a_prefix_that_another_branch_computed() -> None:
    driver = Driver()
    driver.step(new=[driver.new("a", PROMPT, 1)])
    branch = pooled_branch(driver, "p", PROMPT, 1, "last", computed=32)
    output = driver.step(new=[branch], sampled=[], pooled_req_ids=["p"])
    np.testing.assert_allclose(vector(output), oracle_vector(LLAMA, PROMPT, "last"), atol=1e-4)


def test_a_mean_that_was_preempted_begins_anew() -> None:
    driver = Driver()
    driver.step(new=[pooled_branch(driver, "p", PROMPT, 1, "mean")], counts={"p": 20}, sampled=[])
    driver.step(preempted_req_ids=["p"], scheduled_cached_reqs=CachedRequestData())
    assert len(driver.runner.pooling) == 0
    assert whole(driver, "mean").tobytes() == whole(Driver(), "mean").tobytes()


def test_a_mean_without_its_first_rows_is_refused() -> None:
    driver = Driver()
    with pytest.raises(ValueError, match="first 16 rows"):
        driver.step(new=[pooled_branch(driver, "p", PROMPT, 1, "mean", computed=16)], sampled=[], pooled_req_ids=["p"])


def test_the_state_of_the_first_token_is_read_where_all_tokens_are_in_one_step() -> None:
    bert = tiny_bert()
    driver = Driver(bert)
    output = driver.step(
        new=[
            pooled_branch(driver, "p", PROMPT, 1, "first"),
            pooled_branch(driver, "m", OTHER, 7, "mean"),
            pooled_branch(driver, "q", OTHER, 13, "first"),
        ],
        sampled=[],
        pooled_req_ids=["p", "m", "q"],
    )
    np.testing.assert_allclose(vector(output), oracle_vector(bert, PROMPT, "first"), atol=1e-4)
    np.testing.assert_allclose(vector(output, "q"), oracle_vector(bert, OTHER, "first"), atol=1e-4)
    with pytest.raises(ValueError, match="not in the step of its last"):
        in_chunks(Driver(bert), "first", [20, 17])
    with pytest.raises(ValueError, match="first 16 rows"):
        driver.step(new=[pooled_branch(driver, "r", PROMPT, 1, "first", computed=16)], sampled=[], pooled_req_ids=["r"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_without_a_usable_number_fails_its_branch_alone(kind: str) -> None:
    driver = Driver(poisoned(LLAMA))
    output = driver.step(
        new=[
            pooled_branch(driver, "bad", [3, NAN_TOKEN], 1, kind),
            pooled_branch(driver, "good", OTHER, 7, kind),
            driver.new("a", OTHER, 13),
        ],
        sampled=["a"],
        pooled_req_ids=["bad", "good"],
    )
    assert set(output.errors) == {"bad"} and set(output.pooled) == {"good"} and output.req_ids == ["a"]


def test_steps_without_pooling_branches_read_the_rows_that_they_always_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass is asked for sampled rows alone, before a pooling branch came and after it went."""
    driver = Driver()
    asked: list[int | None] = []
    forward = driver.runner.model.forward

    def listen(ids: Any, positions: Any, step: Any, rows: torch.Tensor | None, *rest: Any) -> FinalStates:
        asked.append(None if rows is None else len(rows))
        return forward(ids, positions, step, rows, *rest)

    monkeypatch.setattr(driver.runner.model, "forward", listen)
    driver.step(new=[driver.new("a", PROMPT, 1), driver.new("b", OTHER, 7)])
    branch = pooled_branch(driver, "p", OTHER, 13, "mean")
    driver.step(
        known={"a": 37, "b": 21},
        new=[branch],
        sampled=["a", "b"],
        pooled_req_ids=["p"],
        counts={"p": 21, "a": 1, "b": 1},
    )
    driver.step(known={"a": 38, "b": 22}, finished_req_ids=["p"])
    assert asked == [2, 23, None]


def test_sums_are_added_up_in_the_order_of_the_tokens() -> None:
    """Numbers whose sum depends on the order, even in float64."""
    rows = torch.tensor([[1e20], [1.0], [-1e20], [3.0]]).repeat(1, 33)
    whole_sum = add_rows(None, rows)
    in_parts = add_rows(add_rows(add_rows(None, rows[:1]), rows[1:3]), rows[3:])
    assert whole_sum.dtype == torch.float64
    assert whole_sum.tolist() == in_parts.tolist() == [3.0] * 33


def test_a_vector_in_a_row_beyond_all_that_are_sampled_leaves_without_trace() -> None:
    """Rows that read hidden states may hold the first ones, and a pooling branch is never added to the sampled."""
    driver = Driver()
    driver.runner.input_batch._free_rows = [driver.runner.input_batch._free_rows[0]]  # the last row alone
    output = driver.step(new=[pooled_branch(driver, "p", PROMPT, 1, "last")], sampled=[], pooled_req_ids=["p"])
    assert "p" in output.pooled
    driver.step(finished_req_ids=["p"])
    assert "p" not in driver.runner.input_batch.row_of
