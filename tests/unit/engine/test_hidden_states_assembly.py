"""Rows that an engine sends in parts become one array, in the order in which they were asked for."""

from __future__ import annotations

import random

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.core.errors import EngineError
from ratoon.core.outputs import HiddenStatesOutput, RequestOutput
from ratoon.core.params import HiddenStatesParams
from ratoon.core.wire import WireTensor
from ratoon.engine.input.hidden_states import HiddenStatesSelector, Selection, layers_passed
from ratoon.engine.output.answers import Arrangement, HiddenStatesAssembly, as_torch, with_torch_tensors
from tests.unit.engine.fakes import HIDDEN_SIZE, NUM_LAYERS, hidden_state, model_config, wire_tensor

LENGTH = 12
WHOLE = numpy.array(  # [layers, positions, hidden]
    [[hidden_state(position, layer) for position in range(LENGTH)] for layer in range(NUM_LAYERS + 2)], numpy.float32
)


def selection_of(positions: object, layers: object = None, dtype: str = "float32") -> Selection:
    params = HiddenStatesParams(positions=positions, layers=layers, dtype=dtype)
    return HiddenStatesSelector(model_config()).select(params, LENGTH, 0)


def part_of(selection: Selection, first: int, count: int) -> WireTensor:
    extraction = selection.extraction
    rows = WHOLE[extraction.layers][:, extraction.positions[first : first + count]]
    return wire_tensor(rows, extraction.dtype)


@given(
    positions=st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=20),
    layers=st.lists(st.integers(0, NUM_LAYERS) | st.sampled_from(["norm", "pre_norm"]), min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
)
def test_parts_of_any_size_make_the_array_that_was_asked_for(positions: list, layers: list, seed: int):
    selection = selection_of(positions, layers)
    assembly = HiddenStatesAssembly(selection)
    dice, first, num_rows = random.Random(seed), 0, len(selection.extraction.positions)
    while first < num_rows:
        assert not assembly.complete
        if dice.random() < 0.2:
            first = 0  # another engine begins again
        count = dice.randint(1, num_rows - first)
        assembly.add(part_of(selection, first, count), first)
        first += count
    assert assembly.complete
    output = HiddenStatesOutput("r", assembly.take_array(), "float32", layers, selection.positions, [])
    Arrangement(selection, range(100, 100 + LENGTH)).apply(output)
    array = output.tensor
    assert output.token_ids == [100 + position for position in positions]
    planes = [layers_passed(layer, NUM_LAYERS) for layer in layers]
    numpy.testing.assert_array_equal(array, WHOLE[planes][:, positions])
    assert array.flags.c_contiguous and array.flags.writeable and array.flags.owndata


def test_rows_that_do_not_fit_are_the_engines_fault():
    selection = selection_of([0, 1, 2], [0, 1])
    for part, first in (
        (part_of(selection, 1, 1), 1),  # a hole
        (part_of(selection, 0, 3), 1),  # too many
        (wire_tensor(numpy.zeros((1, 3, HIDDEN_SIZE)), "float32"), 0),  # too few layers
        (wire_tensor(numpy.zeros((2, 3)), "float32"), 0),
        (wire_tensor(numpy.zeros((2, 3, HIDDEN_SIZE)), "float16"), 0),
        (part_of(selection, 0, 1), -1),
    ):
        with pytest.raises(EngineError, match="of 3 rows of 2 layers in float32"):
            HiddenStatesAssembly(selection).add(part, first)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_torch_tensor_is_the_same_memory(dtype: str):
    torch = pytest.importorskip("torch")
    selection = selection_of("all", [*range(NUM_LAYERS), "pre_norm", "norm"], dtype)
    assembly = HiddenStatesAssembly(selection)
    assembly.add(part_of(selection, 0, LENGTH), 0)
    array = assembly.take_array()
    tensor = as_torch(array, dtype)
    assert tensor.dtype == getattr(torch, dtype) and tensor.data_ptr() == array.ctypes.data
    # Eighths and sixty-fourths of small numbers: what does not fit into bfloat16 is cut off there.
    assert torch.allclose(tensor.float(), torch.from_numpy(WHOLE), rtol=2**-7)


def test_an_outputs_tensors_are_put_where_its_arrays_were():
    torch = pytest.importorskip("torch")
    states = HiddenStatesOutput("r", WHOLE.copy(), "float32", [], [], [])
    failed = HiddenStatesOutput("r", None, "float32", [], [], [], error="no")
    output = RequestOutput("r", None, None, [], True, hidden_states=[states, failed])
    with_torch_tensors(output)
    assert torch.equal(states.tensor, torch.from_numpy(WHOLE)) and failed.tensor is None
    with_torch_tensors(RequestOutput("r", None, None, [], True))
