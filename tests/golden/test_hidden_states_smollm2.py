"""SmolLM2's hidden states, out of the embedded GGUF file: those of transformers, which reads the same file.

Its residual stream grows to the ten thousands in a few places, where float32 itself is no finer than a thousandth, so a
row is compared on its own scale. transformers runs in float64 here: where later layers take most of a large number away
again, its float32 is further from that than the tolerance.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ratoon.api.llm import LLM
from ratoon.core.errors import ModelError
from ratoon.core.request import InheritedFrom
from ratoon.models.embedded import find_embedded_model
from tests.golden.engines import check_nothing_left
from tests.golden.gguf_oracle import load_oracle
from tests.golden.hidden_oracle import TOLERANCE, CoreDriver, extraction_of, states_by_transformers
from tests.golden.test_smollm2 import MODEL, TEXTS

pytestmark = [pytest.mark.slow, pytest.mark.full]

NUM_LAYERS = 30
ALL_LAYERS = list(range(NUM_LAYERS + 2))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    try:
        find_embedded_model(MODEL)
    except ModelError as error:  # its text has the command that installs it
        pytest.skip(str(error))
    with LLM(MODEL, num_blocks=60, num_threads=1, quantization="none") as built:
        yield built


@pytest.fixture(scope="module")
def oracle(llm: LLM) -> Any:
    return copy.deepcopy(load_oracle(MODEL)).double()  # other tests use the one in float32


@pytest.fixture
def driver(llm: LLM) -> Iterator[CoreDriver]:
    assert llm.reset_prefix_cache()
    yield CoreDriver(llm)
    llm.reset_prefix_cache()
    check_nothing_left(llm)


@pytest.fixture
def texts(llm: LLM) -> list[list[int]]:
    return [llm.get_tokenizer().encode(text) for text in TEXTS]


def assert_right(found: np.ndarray, expected: np.ndarray) -> None:
    """Within 1e-4 where a row's numbers are up to 10, and within as many digits where they are larger."""
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    difference = np.abs(found - expected) / np.maximum(1.0, largest / 10)
    assert difference.max() < TOLERANCE


def test_every_layer_and_position_is_that_of_transformers(
    driver: CoreDriver, texts: list[list[int]], oracle: Any
) -> None:
    for number, text in enumerate(texts):
        driver.add(extraction_of(str(number), text, range(len(text)), ALL_LAYERS))
    driver.run()
    for number, text in enumerate(texts):
        expected = states_by_transformers(oracle, text)
        assert_right(driver[str(number)].states, expected)


def test_states_of_what_was_generated_come_without_a_second_prefill(
    driver: CoreDriver, texts: list[list[int]], oracle: Any
) -> None:
    sequence = driver.generate("g", texts[4], 12, retain_kv=60.0)
    expected = states_by_transformers(oracle, sequence)
    layers, last = [0, 7, NUM_LAYERS, NUM_LAYERS + 1], len(sequence) - 1
    for name, positions in {"last": [last], "some": [0, 7, 30, last], "output": range(len(texts[4]), last)}.items():
        before = driver.num_computed_tokens
        found = driver.extract(name, sequence, positions, layers, "g")
        assert driver.num_computed_tokens - before == found.num_rows_run == len(positions)
        assert found.inherited_from == InheritedFrom.LEASE
        rows = list(positions)
        assert_right(found.states, expected[layers][:, rows])


def test_states_are_the_same_bits_in_chunks_beside_generation_and_with_prefix_hits(
    driver: CoreDriver, texts: list[list[int]]
) -> None:
    text, layers = texts[4], [0, 15, NUM_LAYERS, NUM_LAYERS + 1]
    alone = driver.extract("alone", text, range(len(text)), layers).states
    state = driver.core.scheduler.state
    most, state.max_step_tokens = state.max_step_tokens, 7
    try:
        for number in range(3):
            driver.add(extraction_of(f"x{number}", text, range(number, len(text)), layers, cache_salt=str(number % 2)))
        tokens = driver.generate("beside", texts[1], 8)
    finally:
        state.max_step_tokens = most
    for number in range(3):
        assert np.array_equal(driver[f"x{number}"].states, alone[:, number:]), number
    assert driver.generate("alone again", texts[1], 8, cache_salt="other") == tokens
