"""Hidden states are those of transformers, at every layer and position, and the same bits by every way to ask for them.

The core is asked here, without the API on top. What happens beside other requests is in test_hidden_states_mixed.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.core.request import EngineCoreRequest, FinishReason, InheritedFrom
from ratoon.execution.passes.step_context import PagedStep
from tests.depths import both_depths
from tests.golden.engines import ENGINE_FAMILIES, engine
from tests.golden.hidden_oracle import (
    TOLERANCE,
    Answer,
    CoreDriver,
    all_layers,
    extraction_of,
    num_layers,
    oracle_states,
)
from tests.golden.marks import exact_on_cpu
from tests.golden.tiny_models import MAX_POSITION, random_token_ids

LLAMA = "llama with grouped heads"
ONE_GROUP = [LLAMA, "qwen3 untied with heads that the native kernels take", "gpt2"]
WITH_WINDOWS = [
    "mistral with a window shorter than the sequence",
    "mistral with a window wider than a block",
    "qwen2 with windows by layer type",
]
PROMPT = random_token_ids(50, seed=1)
NUM_NEW = 20
SCATTERED = [0, 1, 3, 15, 16, 17, 18, 40, 47, 48, 49, 50, 62, 68]
LEASE = {"retain_kv": 60.0}


@cache
def sequence_of(family: str) -> list[int]:
    """A prompt and what is generated behind it: the parent of these tests."""
    with engine(family) as llm:
        return CoreDriver(llm).generate("g", PROMPT, NUM_NEW)


@cache
def alone(family: str) -> np.ndarray:
    """All states of that sequence, in an engine that has nothing else to do and nothing cached: [L + 2, T, H]."""
    sequence = sequence_of(family)
    with engine(family) as llm:
        answer = CoreDriver(llm).extract("alone", sequence, range(len(sequence)), all_layers(family))
    np.testing.assert_allclose(answer.states, oracle_states(family, sequence), atol=TOLERANCE, rtol=0)
    return answer.states


def assert_same_bits(answer: Answer, expected: np.ndarray, layers: Sequence[int], positions: Sequence[int]) -> None:
    assert np.array_equal(answer.states, expected[list(layers)][:, list(positions)])


# ---- against transformers ----


@pytest.mark.parametrize("family", ENGINE_FAMILIES)
@pytest.mark.one_in(3)
def test_every_layer_and_position_is_that_of_transformers(family: str) -> None:
    prompts = [random_token_ids(length, seed=length) for length in (1, 2, 16, 17, 70, MAX_POSITION)]
    with engine(family) as llm:
        driver = CoreDriver(llm)
        for number, prompt in enumerate(prompts):
            driver.add(extraction_of(str(number), prompt, range(len(prompt)), all_layers(family)))
        driver.run()
    for number, prompt in enumerate(prompts):
        np.testing.assert_allclose(
            driver[str(number)].states, oracle_states(family, prompt), atol=TOLERANCE, rtol=0, err_msg=str(number)
        )


@pytest.mark.parametrize("family", ENGINE_FAMILIES)
@pytest.mark.one_in(3)
def test_states_of_a_finished_request_are_those_of_transformers(family: str) -> None:
    """Also where the torch backend computes, whose bits depend on the batch."""
    layers = all_layers(family)
    with engine(family) as llm:
        driver = CoreDriver(llm)
        sequence = driver.generate("g", PROMPT, NUM_NEW, **LEASE)
        found = driver.extract("x", sequence, [*SCATTERED, len(sequence) - 1], layers, "g")
        llm.reset_prefix_cache()
    expected = oracle_states(family, sequence)[:, [*SCATTERED, len(sequence) - 1]]
    np.testing.assert_allclose(found.states, expected, atol=TOLERANCE, rtol=0)


# ---- ways in: each leaves the sequence's memory in another state, and says where the extraction finds it ----

Way = Callable[[CoreDriver, list[int]], str | None]  # → the parent to name


def no_parent(driver: CoreDriver, sequence: list[int]) -> str | None:
    return None


def prefix_hit(driver: CoreDriver, sequence: list[int]) -> str | None:
    driver.generate("earlier", sequence[:40], 1)
    return None


def leased_parent(driver: CoreDriver, sequence: list[int]) -> str | None:
    assert driver.generate("g", PROMPT, NUM_NEW, **LEASE) == sequence
    return "g"


def parent_in_the_prefix_cache(driver: CoreDriver, sequence: list[int]) -> str | None:
    driver.generate("g", PROMPT, NUM_NEW)
    return "g"


def parent_that_is_gone(driver: CoreDriver, sequence: list[int]) -> str | None:
    driver.generate("g", PROMPT, NUM_NEW)
    assert driver.core.reset_prefix_cache()
    return "g"


def parent_that_was_evicted(driver: CoreDriver, sequence: list[int]) -> str | None:
    """Others needed the memory: its lease ended, and of its blocks none or only the first are still there."""
    driver.generate("g", PROMPT, NUM_NEW, **LEASE)
    kv_cache = driver.core.scheduler.kv_cache
    num_left = 0 if kv_cache.gives_blocks_back else 2
    length = (kv_cache.num_usable_blocks // kv_cache.num_groups - num_left) * 16 - 1
    driver.generate("large", random_token_ids(length, seed=5), 1)
    assert driver.core.scheduler.leases.find("g") is None
    return "g"


def running_parent(driver: CoreDriver, sequence: list[int]) -> str | None:
    """It is in the middle of what it generates; what it has not computed yet is computed here."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    driver.add(EngineCoreRequest("g", list(PROMPT), params))
    for _ in range(9):
        driver.step()
    assert driver["g"].finish_reason is None
    return "g"


SOURCES: dict[Way, InheritedFrom | None] = {
    no_parent: None,
    prefix_hit: None,
    leased_parent: InheritedFrom.LEASE,
    running_parent: InheritedFrom.LEASE,
    parent_in_the_prefix_cache: InheritedFrom.PREFIX_CACHE,
    parent_that_is_gone: InheritedFrom.RECOMPUTED,
}
WAYS: list[Way] = [*SOURCES, parent_that_was_evicted]


@exact_on_cpu
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("family", [*ONE_GROUP, *WITH_WINDOWS])
@pytest.mark.one_in(11)
def test_every_way_in_gives_the_same_bits(family: str, way: Way) -> None:
    sequence, expected, last = sequence_of(family), alone(family), num_layers(family)
    asked = [
        ([69], [last]),
        ([68], [last + 1]),
        ([49], [0, last]),
        (SCATTERED, [last + 1, 0, 2, last, 2]),  # in the caller's order, one of them twice
        (range(70), all_layers(family)),
        (range(30, 70), [1]),
    ]
    num_blocks = 96
    if way is parent_that_was_evicted:
        num_blocks = 13 if family == "qwen2 with windows by layer type" else 8  # a little more than the sequence needs
    for number, (positions, layers) in enumerate(asked):
        with engine(family, num_blocks=num_blocks) as llm:
            driver = CoreDriver(llm)
            found = driver.extract(str(number), sequence, positions, layers, way(driver, sequence))
            assert_same_bits(found, expected, layers, positions)
            # Under a window a parent may have lost what the first of the rows reads.
            if way in SOURCES and family in ONE_GROUP and not (way is parent_in_the_prefix_cache and positions == [0]):
                assert found.inherited_from == SOURCES[way]
            llm.reset_prefix_cache()


@exact_on_cpu
@pytest.mark.parametrize("family", [LLAMA, *WITH_WINDOWS])
@pytest.mark.parametrize("parent", [None, "g"], ids=["own prompt", "leased parent"])
@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 5},
        {"max_prefill_chunk": 7},
        {"max_num_batched_tokens": 33, "enable_prefix_caching": False},
        {"block_size": 32, "max_num_batched_tokens": 50},
        {"max_num_seqs": 1},
    ],
    ids=str,
)
@pytest.mark.one_in(5)
def test_chunks_and_block_sizes_change_no_bit(family: str, parent: str | None, changes: dict[str, Any]) -> None:
    sequence, layers = sequence_of(family), all_layers(family)
    with engine(family, **changes) as llm:
        driver = CoreDriver(llm)
        if parent is not None:
            driver.generate("g", PROMPT, NUM_NEW, **LEASE)
        for name, positions in (("some", SCATTERED), ("all", range(len(sequence)))):
            found = driver.extract(name, sequence, positions, layers, parent)
            assert_same_bits(found, alone(family), layers, positions)
        step = min(changes.get("max_num_batched_tokens", 512), changes.get("max_prefill_chunk", 512))
        assert len(found.parts) == -(-found.num_rows_run // step)
        llm.reset_prefix_cache()


# ---- the cost ----


@pytest.mark.parametrize("family", ENGINE_FAMILIES)
@pytest.mark.one_in(5)
def test_the_last_token_of_a_finished_request_costs_one_row_whatever_its_length(family: str) -> None:
    with engine(family) as llm:
        for length in (3, 15, 16, 17, 90):
            driver = CoreDriver(llm)
            sequence = driver.generate("g", random_token_ids(length, seed=length), 4, **LEASE)
            for name, position in (("last", len(sequence) - 1), ("before", len(sequence) - 2)):
                before = driver.num_computed_tokens
                found = driver.extract(name, sequence, [position], [num_layers(family)], "g")
                assert driver.num_computed_tokens - before == found.num_rows_run == 1, (length, name)
                np.testing.assert_allclose(
                    found.states[0, 0], oracle_states(family, sequence)[-2, position], atol=TOLERANCE, rtol=0
                )
        llm.reset_prefix_cache()


@pytest.mark.parametrize("family", ONE_GROUP)
def test_scattered_positions_of_a_finished_request_cost_a_row_each(family: str) -> None:
    with engine(family) as llm:
        driver = CoreDriver(llm)
        sequence = driver.generate("g", PROMPT, NUM_NEW, **LEASE)
        for name, positions in {"few": [0, 30], "more": SCATTERED, "with the last": [5, 20, 69]}.items():
            before = driver.num_computed_tokens
            found = driver.extract(name, sequence, positions, [1, 2], "g")
            assert driver.num_computed_tokens - before == found.num_rows_run == len(positions)
        llm.reset_prefix_cache()


def test_under_a_window_rows_are_computed_again_from_the_last_that_are_there() -> None:
    """What lies before the window was given back, so an early position reads nothing that is kept."""
    family = "mistral with a window shorter than the sequence"
    with engine(family) as llm:
        driver = CoreDriver(llm)
        sequence = driver.generate("g", PROMPT, NUM_NEW, **LEASE)
        assert driver.extract("last", sequence, [69], [1], "g").num_rows_run == 1
        llm.reset_prefix_cache()
        driver.generate("h", PROMPT, NUM_NEW, **LEASE)
        assert driver.extract("early", sequence, [20, 69], [1], "h").num_rows_run <= 70
        llm.reset_prefix_cache()


def test_a_prompt_of_its_own_is_run_once_and_then_found_in_the_cache() -> None:
    with engine(LLAMA) as llm:
        driver = CoreDriver(llm)
        assert driver.extract("first", PROMPT, [49], [3]).num_rows_run == 50
        again = driver.extract("again", PROMPT, [49], [3])
        assert (again.num_rows_run, again.num_cached_tokens) == (2, 48)
        assert driver.extract("other", PROMPT, [49], [3], cache_salt="other tenant").num_rows_run == 50


@exact_on_cpu
@pytest.mark.parametrize("family", ONE_GROUP)
def test_a_pass_that_only_reads_ends_behind_the_last_layer_asked_for(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, expected = num_layers(family), alone(family)  # made before layers are counted
    with engine(family) as llm:
        driver = CoreDriver(llm)
        sequence = driver.generate("g", PROMPT, NUM_NEW, **LEASE)
        layers_run: list[int] = []
        attend = PagedStep.attend
        monkeypatch.setattr(
            PagedStep, "attend", lambda step, layer, *args: layers_run.append(layer.index) or attend(step, layer, *args)
        )
        for highest in all_layers(family):
            layers_run.clear()
            found = driver.extract(f"up to {highest}", sequence, SCATTERED, range(highest + 1), "g")
            assert_same_bits(found, expected, range(highest + 1), SCATTERED)
            assert layers_run == list(range(min(highest, last)))
        layers_run.clear()
        found = driver.extract("the last token is new", sequence, [3, 69], [1], "g")  # and so it is written
        assert_same_bits(found, expected, [1], [3, 69])
        assert layers_run == list(range(last))
        llm.reset_prefix_cache()


# ---- dtypes ----


@exact_on_cpu
def test_half_precision_is_the_rounded_float32() -> None:
    layers, positions = all_layers(LLAMA), range(70)
    with engine(LLAMA, max_num_batched_tokens=30) as llm:
        driver = CoreDriver(llm)
        half = driver.extract("half", sequence_of(LLAMA), positions, layers, dtype="float16").states
        brain = driver.extract("brain", sequence_of(LLAMA), positions, layers, dtype="bfloat16").states
    assert half.dtype == np.float16 and np.array_equal(half, alone(LLAMA).astype(np.float16))
    rounded = torch.from_numpy(alone(LLAMA)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert brain.dtype == np.uint16 and np.array_equal(brain, rounded)


# ---- choices ----


@both_depths
@exact_on_cpu
@pytest.mark.parametrize("family", [LLAMA, *WITH_WINDOWS])
@pytest.mark.parametrize("leased", [True, False], ids=["leased", "not leased"])
@pytest.mark.one_in(5)
def test_every_choice_of_several_has_its_own_states(family: str, leased: bool) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=9, ignore_eos=True)
    with engine(family) as llm:
        driver = CoreDriver(llm)
        driver.add(EngineCoreRequest("g", list(PROMPT), params, **(LEASE if leased else {})))
        driver.run()
        check_choices(driver, family, leased)
        llm.reset_prefix_cache()


@both_depths
@exact_on_cpu
@pytest.mark.parametrize("family", [LLAMA, *WITH_WINDOWS])
@pytest.mark.parametrize("leased", [True, False], ids=["leased", "not leased"])
@pytest.mark.one_in(5)
def test_every_text_of_a_beam_search_has_its_own_states(family: str, leased: bool) -> None:
    beams = BeamSearchParams(beam_width=4, n=3, max_tokens=9, all_stop_token_ids=[])
    with engine(family) as llm:
        driver = CoreDriver(llm)
        driver.add(EngineCoreRequest("g", list(PROMPT), beams, **(LEASE if leased else {})))
        driver.run()
        check_choices(driver, family, leased)
        llm.reset_prefix_cache()


def check_choices(driver: CoreDriver, family: str, leased: bool) -> None:
    """The three choices' last tokens and one further position, asked for together."""
    sequences, layers = {}, all_layers(family)
    for choice in range(3):
        answer = driver.answers["g", choice]
        assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        sequences[choice] = [*PROMPT, *answer.token_ids]
    assert len({tuple(sequence) for sequence in sequences.values()}) == 3
    before = driver.num_computed_tokens
    for choice, sequence in sequences.items():
        parent = "g" if choice == 0 else f"g#{choice}"
        driver.add(extraction_of(f"x{choice}", sequence, [len(sequence) - 1], layers, parent))
    driver.run()
    if leased:
        assert driver.num_computed_tokens - before == 3
    for choice, sequence in sequences.items():
        found = driver[f"x{choice}"]
        assert (found.inherited_from == InheritedFrom.LEASE) == leased
        np.testing.assert_allclose(
            found.states[:, 0], oracle_states(family, sequence)[:, -1], atol=TOLERANCE, rtol=0, err_msg=str(choice)
        )
        fresh = driver.extract(f"fresh{choice}", sequence, [len(sequence) - 1], layers, cache_salt="other")
        assert np.array_equal(found.states, fresh.states)
