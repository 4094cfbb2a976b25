"""An optional column that nothing but its declaration and the source of its values knows reaches the program in every
way to run a step: by calls, padded, and in a recorded pass."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.execution.inputs.batch_rows import StepBatch
from ratoon.execution.inputs.columns import (
    PREPARED,
    SENT,
    Column,
    Per,
    PreparedColumn,
    StepColumns,
    is_read,
    names_of,
)
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.inputs.step_inputs import InputPreparation, StepInputs
from ratoon.execution.passes.recorded_passes import PassResult, RecordedPass, RecordedPasses
from tests.triton_interpreter import repair_interpreter
from tests.unit.execution.test_model_runner import (
    CPU,
    LLAMA,
    OTHER,
    Driver,
    interpreted,
    needs_kernels,
    oracle_greedy,
    token_of,
)

repair_interpreter()

NAME, PADDING = "weather", -7
LENGTHS = {"a": 7, "b": 3, "c": 5}  # tokens of prompts
NUM_DECODES = 4


class RunAgain:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.replay = function


class Source:
    """Values of the column that differ from step to step, while it is on."""

    def __init__(self, per: Per) -> None:
        self._per = per
        self.is_on = True
        self.given: list[list[int]] = []

    def __call__(self, rows: InputBatch, batch: StepBatch) -> StepColumns:
        if not self.is_on:
            return {}
        count = len(batch.rows) if self._per is Per.REQUEST else int(batch.cu_num_tokens[-1])
        self.given.append([100 * (1 + len(self.given)) + place for place in range(count)])
        return {NAME: np.array(self.given[-1], np.int32)}


def driver_with(source: Source, name: str) -> Driver:
    driver = Driver(LLAMA, "resident", capture=RunAgain) if name == "padded" else Driver(LLAMA, name)
    driver.runner._column_sources.append(source)
    return driver


def run_steps(driver: Driver, begin: int = 0) -> None:
    """A step of three prompts, if they are not there yet, then decodes of all three: their tokens are the model's."""
    prompts = {name: OTHER[:length] for name, length in LENGTHS.items()}
    new = [driver.new(name, prompt, 1 + 4 * place) for place, (name, prompt) in enumerate(prompts.items())]
    outputs = [driver.step(new=new)] if begin == 0 else []
    for step in range(begin, begin + NUM_DECODES):
        known = {name: length + step for name, length in LENGTHS.items()}
        outputs += [driver.step(known=known)]
    first = 0 if begin == 0 else begin + 1
    for name, prompt in prompts.items():
        expected = oracle_greedy(LLAMA, prompt, first + len(outputs))[first:]
        assert [token_of(output, name) for output in outputs] == expected


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def declare(per: Per, **rest: Any) -> None:
        column = Column(NAME, per, torch.int32, padding=PADDING, is_optional=True, **rest)
        monkeypatch.setitem(SENT, NAME, column)

    return declare


@pytest.mark.parametrize("per", [Per.TOKEN, Per.REQUEST])
@pytest.mark.parametrize(
    "name",
    [
        "torch",
        pytest.param("native", marks=needs_kernels),
        *[pytest.param(name, marks=interpreted) for name in ("resident", "padded")],
    ],
)
@pytest.mark.one_in(3)
def test_a_column_reaches_the_program_as_its_declaration_says(
    name: str, per: Per, declare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(per)
    source = Source(per)
    driver = driver_with(source, name)
    seen: list[list[int] | None] = []
    run = driver.runner.program.run

    def watch(inputs: StepInputs, *rest: Any) -> Any:
        seen.append(inputs.columns[NAME].tolist() if NAME in inputs.columns else None)
        return run(inputs, *rest)

    monkeypatch.setattr(driver.runner.program, "run", watch)
    run_steps(driver)
    source.is_on = False
    run_steps(driver, begin=NUM_DECODES)
    assert seen[-NUM_DECODES:] == [None] * NUM_DECODES
    assert len(seen) == len(source.given) + NUM_DECODES
    for found, given in zip(seen, source.given):
        assert found is not None and found[: len(given)] == given
        assert found[len(given) :] == [PADDING] * (len(found) - len(given))
    with_column = [len(found) for found in seen if found is not None]
    assert with_column[1:] == [4 if name == "padded" else 3] * NUM_DECODES
    if name == "padded":
        assert with_column[0] > len(source.given[0])
        assert driver.runner.graphs is not None
        assert {key.columns for key in driver.runner.graphs._seen} == {frozenset([NAME]), frozenset()}


@needs_kernels
@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_recorded_pass_reads_it_where_each_step_has_it(
    is_recorded: bool, declare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(Per.TOKEN, is_recorded=is_recorded)
    source = Source(Per.TOKEN)
    driver = driver_with(source, "recorded")
    seen: list[list[int]] = []
    replay = RecordedPasses._replay

    def watch(passes: RecordedPasses, recorded: RecordedPass, *rest: Any) -> PassResult | None:
        *_, places = recorded.places
        if NAME in places:
            seen.append(list((ctypes.c_int32 * len(LENGTHS)).from_address(places[NAME])))
        result = replay(passes, recorded, *rest)
        assert result is not None
        return result

    monkeypatch.setattr(RecordedPasses, "_replay", watch)
    run_steps(driver)
    source.is_on = False
    run_steps(driver, begin=NUM_DECODES)
    assert driver.runner.recorded is not None
    names = {shape.columns for shape in driver.runner.recorded._passes}
    assert names == ({frozenset([NAME]), frozenset()} if is_recorded else {frozenset()})
    # The first decode runs by calls, the second is recorded.
    assert seen == (source.given[3:] if is_recorded else [])


def test_preparation_on_the_host_has_memory_for_each_column_that_is_declared(
    declare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(Per.REQUEST)
    wide = PreparedColumn("wide", Per.TOKEN, torch.int16, times="num_groups")
    monkeypatch.setitem(PREPARED, "wide", wide)
    rows = InputBatch(4, 64, [16, 8])
    buffers = InputPreparation(rows, max_num_tokens=32, max_num_reqs=3, device=CPU)._buffers
    optional = {name for name, column in SENT.items() if column.is_optional and is_read(column, rows)}
    assert buffers.keys() == {name for name, column in PREPARED.items() if is_read(column, rows)} | optional
    assert "rope_positions" not in buffers and "encoder_lens" not in buffers
    assert (buffers["wide"].array.shape, buffers["wide"].array.dtype) == ((2, 32), np.int16)
    assert buffers[NAME].array.shape == (3,)
    assert buffers["block_table"].array.shape == (2, 3, rows.max_blocks)


def test_keys_of_the_same_columns_hold_one_object() -> None:
    assert names_of({"b": 1, "a": 2}) is names_of({"a": 3, "b": 4}) == {"a", "b"}
    assert names_of({}) is names_of({}) == frozenset()
