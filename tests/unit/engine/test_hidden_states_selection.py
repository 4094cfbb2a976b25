"""Positions and layers as people write them become numbers, or an error that names the field and the numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.core.errors import RequestError, TooLargeError
from ratoon.core.params import HiddenStatesParams
from ratoon.engine.input.hidden_states import HiddenStatesSelector, Selection, layers_passed, resolve_layers
from tests.unit.engine.fakes import HIDDEN_SIZE, NUM_LAYERS, model_config

SELECTOR = HiddenStatesSelector(model_config())
FAR = st.integers(-12, 12)
PAIRS = st.tuples(FAR, st.none() | FAR).map(list)


def select(num_prompt: int = 5, num_output: int = 4, **params: Any) -> Selection:
    asked = HiddenStatesParams(**params)
    SELECTOR.verify(asked)
    return SELECTOR.select(asked, num_prompt, num_output)


def plain_positions(asked: Any, scope: str, num_prompt: int, num_output: int) -> list[int] | None:
    """What Python's own indexing finds in the part of a sequence; None: an error."""
    sequence = list(range(num_prompt + num_output))
    part = {"all": sequence, "prompt": sequence[:num_prompt], "output": sequence[num_prompt:]}[scope]
    found: list[int] = []
    for piece in [[0, None]] if asked == "all" else asked if isinstance(asked, list) else [asked]:
        if not isinstance(piece, list):
            if piece not in range(-len(part), len(part)):
                return None
            found.append(part[piece])
            continue
        borders = [len(part) if border is None else border for border in piece]
        if any(border not in range(-len(part), len(part) + 1) for border in borders):
            return None
        start, stop = (border % len(part) if border < 0 else border for border in borders)
        if stop < start:
            return None
        found += part[start:stop]
    return found or None


@given(
    asked=st.one_of(st.just("all"), FAR, st.lists(FAR | PAIRS, max_size=6)),
    scope=st.sampled_from(["all", "prompt", "output"]),
    num_prompt=st.integers(1, 7),
    num_output=st.integers(0, 5),
)
def test_positions_are_those_that_plain_indexing_finds(asked: Any, scope: str, num_prompt: int, num_output: int):
    expected = plain_positions(asked, scope, num_prompt, num_output)
    if expected is None:
        with pytest.raises(RequestError) as refused:
            select(num_prompt, num_output, positions=asked, scope=scope)
        assert refused.value.field == "positions"
        return
    selection = select(num_prompt, num_output, positions=asked, scope=scope)
    assert selection.positions == expected
    extraction = selection.extraction
    assert extraction.positions == sorted(set(expected)), "the engine gets each once, rising"
    assert [extraction.positions[row] for row in selection.row_order] == expected


@given(
    st.lists(st.integers(-NUM_LAYERS - 1, NUM_LAYERS) | st.sampled_from(["norm", "pre_norm"]), min_size=1, max_size=8)
)
def test_layers_are_entries_of_transformers_hidden_states(asked: list[int | str]):
    """Its last one has passed the final norm; the engine counts that as one layer more."""
    entries = [*range(NUM_LAYERS), NUM_LAYERS + 1]
    passed = {"norm": NUM_LAYERS + 1, "pre_norm": NUM_LAYERS}
    selection = select(layers=asked)
    assert selection.layers == [layer if isinstance(layer, str) else range(NUM_LAYERS + 1)[layer] for layer in asked]
    numbers = [passed[layer] if isinstance(layer, str) else entries[layer] for layer in asked]
    assert selection.extraction.layers == sorted(set(numbers))
    assert [selection.extraction.layers[place] for place in selection.layer_order] == numbers


def test_what_is_left_out_is_the_last_token_behind_the_final_norm():
    selection = select(num_prompt=5, num_output=4)
    assert (selection.positions, selection.layers) == ([8], [NUM_LAYERS])
    assert selection.extraction.layers == [NUM_LAYERS + 1]
    assert selection.extraction.dtype == "float32" and selection.extraction.deadline is None


def test_all_layers_are_the_embeddings_and_each_layer_the_last_behind_the_norm():
    everything = select(layers="all")
    assert (everything.layers, everything.extraction.layers) == ([0, 1, 2, 3], [0, 1, 2, 4])
    assert select(layers="norm").layers == ["norm"]
    assert select(layers=["pre_norm", 3]).extraction.layers == [3, 4]
    assert select(layers=-1).layers == [NUM_LAYERS]


def test_whole_numbers_of_other_types_and_ranges_are_taken():
    assert select(positions=numpy.int64(-2)).positions == [7]
    assert select(positions=range(2, 5), layers=(numpy.int32(1), 0)).positions == [2, 3, 4]


@pytest.mark.parametrize(
    ("params", "field", "numbers"),
    [
        ({"positions": 9}, "positions", ["9", "sequence has 9 tokens", "-9 to 8"]),
        ({"positions": [0, -10]}, "positions", ["-10", "-9 to 8"]),
        ({"positions": [[0, 10]]}, "positions", ["10", "-9 to 9"]),
        ({"positions": [[5, 3]]}, "positions", ["[5, 3]", "from 5 to 3"]),
        ({"positions": [[4, 4]]}, "positions", ["none of the 9 tokens"]),
        ({"positions": 5, "scope": "prompt"}, "positions", ["prompt has 5 tokens", "-5 to 4"]),
        ({"positions": -5, "scope": "output"}, "positions", ["output has 4 tokens"]),
        ({"positions": []}, "positions", ["is empty"]),
        ({"positions": "some"}, "positions", ["'some'"]),
        ({"positions": 1.5}, "positions", ["1.5"]),
        ({"positions": True}, "positions", ["True"]),
        ({"positions": None}, "positions", ["None"]),
        ({"positions": [0, "all"]}, "positions[1]", ["'all'"]),
        ({"positions": [[0, 1, 2]]}, "positions[0]", ["3 entries"]),
        ({"positions": [[None, 1]]}, "positions[0]", ["None"]),
        ({"layers": 4}, "layers", ["4", "3 layers", "-4 to 3"]),
        ({"layers": [0, -5]}, "layers", ["-5"]),
        ({"layers": []}, "layers", ["is empty"]),
        ({"layers": "last"}, "layers", ["'last'"]),
        ({"layers": ["all"]}, "layers[0]", ["'all'"]),
        ({"layers": [0.5]}, "layers[0]", ["0.5"]),
        ({"scope": "answer"}, "scope", ["'answer'"]),
        ({"dtype": "float64"}, "dtype", ["'float64'"]),
        ({"deadline": 0}, "deadline", ["0"]),
        ({"deadline": 1e9}, "deadline", ["at most 86400"]),
        ({"deadline": math.inf}, "deadline", ["inf"]),
    ],
)
def test_what_does_not_exist_is_refused_with_the_numbers(params: dict, field: str, numbers: list[str]):
    with pytest.raises(RequestError) as refused:
        select(**params)
    assert refused.value.field == field
    for number in numbers:
        assert number in str(refused.value)


def test_a_scope_without_tokens_has_no_positions():
    with pytest.raises(RequestError, match="the output has no tokens"):
        select(num_output=0, scope="output")


def test_params_must_be_params():
    with pytest.raises(RequestError, match="dict is not HiddenStatesParams"):
        SELECTOR.verify({"positions": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_more_bytes_than_may_be_asked_for_are_refused_with_the_numbers(dtype: str, item: int):
    num_bytes = 3 * 2 * HIDDEN_SIZE * item
    params = HiddenStatesParams(positions=[1, 1, 0], layers=[0, 0], dtype=dtype)  # what is asked for twice counts twice
    HiddenStatesSelector(model_config(), num_bytes).select(params, 5, 0)
    with pytest.raises(TooLargeError) as refused:
        HiddenStatesSelector(model_config(), num_bytes - 1).select(params, 5, 0)
    for number in ("3 positions of 2 layers", str(num_bytes), str(num_bytes - 1)):
        assert number in str(refused.value)


def test_a_short_list_that_names_very_many_positions_is_refused_before_they_are_written_out():
    with pytest.raises(TooLargeError):
        select(num_prompt=10**9, positions="all", layers="all")
    with pytest.raises(TooLargeError):
        select(num_prompt=10**6, positions=[[0, None]] * 10**4)


# ---- what an answer may still become ----


def check_longest(max_output: int, num_choices: int = 1, max_bytes: int = 10**6, **params: Any) -> None:
    HiddenStatesSelector(model_config(), max_bytes).verify_longest(
        HiddenStatesParams(**params), 5, max_output, num_choices
    )


def test_what_the_longest_answer_could_have_may_be_asked_for():
    check_longest(10, scope="output", positions=[9, -10])
    with pytest.raises(RequestError, match="output has 10 tokens"):
        check_longest(10, scope="output", positions=10)
    with pytest.raises(RequestError, match="sequence has 15 tokens"):
        check_longest(10, positions=-16)


def test_the_size_limit_is_for_all_choices_at_their_longest():
    one = 15 * HIDDEN_SIZE * 4
    check_longest(10, num_choices=3, max_bytes=3 * one, positions="all")
    with pytest.raises(TooLargeError, match="45 positions"):
        check_longest(10, num_choices=3, max_bytes=3 * one - 1, positions="all")


def test_positions_and_layers_can_travel_and_mean_the_same():
    params = HiddenStatesParams(positions=range(3), layers=("norm", numpy.int64(-1)), dtype="float16")
    plain = SELECTOR.in_plain_lists(params)
    assert (plain.positions, plain.layers) == ([0, 1, 2], ["norm", 3])
    everything = SELECTOR.in_plain_lists(HiddenStatesParams(positions="all", layers="all"))
    assert (everything.positions, everything.layers) == ([[0, None]], [0, 1, 2, 3])
    assert SELECTOR.select(plain, 5, 4) == SELECTOR.select(params, 5, 4)
    assert resolve_layers(everything.layers, NUM_LAYERS) == resolve_layers("all", NUM_LAYERS)


# ---- each once ----


@given(
    asked=st.lists(FAR | PAIRS, min_size=1, max_size=8),
    layers=st.lists(st.integers(0, NUM_LAYERS) | st.sampled_from(["norm", "pre_norm"]), min_size=1, max_size=6),
)
def test_each_once_has_the_same_positions_and_layers_where_they_are_named_first(asked: list, layers: list):
    try:
        repeated = select(positions=asked, layers=layers)
    except RequestError as error:
        with pytest.raises(type(error)):
            select(positions=asked, layers=layers, each_once=True)
        return
    once = select(positions=asked, layers=layers, each_once=True)
    assert once.positions == list(dict.fromkeys(repeated.positions))
    passed = [layers_passed(layer, NUM_LAYERS) for layer in repeated.layers]  # "norm" is the last by another name
    assert once.layers == [repeated.layers[passed.index(number)] for number in dict.fromkeys(passed)]
    assert once.extraction == repeated.extraction, "the engine has the same to do"
    assert once.num_bytes == len(once.positions) * len(once.layers) * HIDDEN_SIZE * 4


@pytest.mark.slow
def test_what_is_named_a_million_times_is_as_large_as_once():
    selector = HiddenStatesSelector(model_config(), 5000 * HIDDEN_SIZE * 4)
    many = HiddenStatesParams(positions=[[0, None], [1, None], 3] * 100_000, layers=[0] * 1000, each_once=True)
    selection = selector.select(many, 5000, 0)
    assert len(selection.positions) == 5000 and selection.layers == [0]
    selector.verify_longest(many, 100, 4900, 1)
    with pytest.raises(TooLargeError):
        selector.select(HiddenStatesParams(positions=[[0, None]] * 2), 5000, 0)
