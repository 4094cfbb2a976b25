"""Encoder inputs in the scheduler: when the encoder runs, its budget in a step, and what is refused."""

from __future__ import annotations

from array import array

import pytest

from ratoon.core.adapters import Adapter, AdapterReport
from ratoon.core.encoder import EncoderInput, features_for_encoder
from ratoon.core.errors import RequestError
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import EncoderStep
from ratoon.core.request import EngineCoreRequest
from ratoon.core.wire import WireTensor
from tests.unit.scheduling.encoding import (
    add_encoded,
    document,
    encoded,
    encoder_blocks,
    encoder_scheduler,
    finish,
    new_of,
    step,
)
from tests.unit.scheduling.steps import add, new_ids, request_of

PROMPT = list(range(100, 110))  # two blocks and two tokens

# ---- when the encoder runs ----


def test_an_input_runs_whole_in_the_step_that_lets_its_first_branch_in() -> None:
    scheduler = encoder_scheduler(max_num_batched_tokens=4)
    add_encoded(scheduler, "a", PROMPT, document(9))
    plan, _ = step(scheduler)
    assert plan.encoder_steps == [EncoderStep("a", document(9), [1, 2, 3])]
    new = new_of(plan, "a")
    assert (new.cross_block_ids, new.num_encoder_positions, new.block_ids) == ([1, 2, 3], 9, ([4],))
    assert plan.num_scheduled_tokens == {"a": 4} and plan.total_num_scheduled_tokens == 4  # a budget of its own
    plans = [step(scheduler)[0] for _ in range(4)]
    assert [plan.num_scheduled_tokens["a"] for plan in plans] == [4, 2, 1, 1]
    assert not any(plan.encoder_steps or plan.scheduled_new_reqs for plan in plans)
    assert scheduler.stats().num_encoder_runs == 1


def test_those_who_bring_the_same_input_read_one_table_in_one_step() -> None:
    scheduler = encoder_scheduler()
    for name in "abc":
        add_encoded(scheduler, name, 5, document(6))
    plan, _ = step(scheduler)
    assert encoder_blocks(plan) == {"a": [1, 2]}
    assert [new.cross_block_ids for new in plan.scheduled_new_reqs] == [[1, 2]] * 3
    assert 100 - 1 - scheduler.kv_cache.num_free_blocks == 2 + 3 * 2


def test_who_comes_later_finds_the_table_while_it_is_held_and_when_nobody_holds_it() -> None:
    scheduler = encoder_scheduler()
    add_encoded(scheduler, "a", 5, document(6), max_tokens=5)
    step(scheduler)
    add_encoded(scheduler, "b", 5, document(6), max_tokens=2)
    plan, _ = step(scheduler)
    assert plan.encoder_steps == [] and new_of(plan, "b").cross_block_ids == [1, 2]
    finish(scheduler)
    assert scheduler.kv_cache.usage == 0.0
    add_encoded(scheduler, "c", 5, document(6))
    plan, _ = step(scheduler)
    assert plan.encoder_steps == [] and new_of(plan, "c").cross_block_ids == [1, 2]
    assert scheduler.stats().num_encoder_runs == 1


def test_without_a_prefix_cache_a_table_is_shared_as_long_as_somebody_holds_it() -> None:
    scheduler = encoder_scheduler(caching=False)
    add_encoded(scheduler, "a", 5, document(6), max_tokens=2)
    step(scheduler)
    add_encoded(scheduler, "b", 5, document(6), max_tokens=2)
    assert step(scheduler)[0].encoder_steps == []
    finish(scheduler)
    add_encoded(scheduler, "c", 5, document(6), max_tokens=2)
    assert list(encoder_blocks(step(scheduler)[0])) == ["c"]


def test_another_input_another_salt_and_another_adapter_run_for_themselves() -> None:
    scheduler = encoder_scheduler(num_adapter_slots=1)
    tuned = Adapter("d" * 32, "/tuned", 8)
    add_encoded(scheduler, "first", PROMPT, document(9), adapter=tuned, max_tokens=1)
    scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput(adapters=AdapterReport([0])))
    finish(scheduler)
    add_encoded(scheduler, "a", PROMPT, document(6))
    add_encoded(scheduler, "b", PROMPT, document(6, number=1))
    add_encoded(scheduler, "c", PROMPT, document(6), salt="tenant")
    add_encoded(scheduler, "d", PROMPT, document(6), adapter=tuned)
    plan, _ = step(scheduler)
    assert [one.adapter_slot for one in plan.encoder_steps] == [-1, -1, -1, 0]
    assert list(encoder_blocks(plan)) == ["a", "b", "c", "d"]
    blocks = [block for new in plan.scheduled_new_reqs for block in new.cross_block_ids]
    assert len(set(blocks)) == 8
    assert [new.num_computed_tokens for new in plan.scheduled_new_reqs] == [0, 0, 0, 0]


def test_a_prefix_of_the_decoder_is_found_with_the_same_encoder_input_only() -> None:
    scheduler = encoder_scheduler()
    add_encoded(scheduler, "a", PROMPT, document(6), max_tokens=1)
    step(scheduler)
    add_encoded(scheduler, "same", PROMPT, document(6), max_tokens=1)
    add_encoded(scheduler, "other", PROMPT, document(7), max_tokens=1)
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"same": 2, "other": 10}
    assert (outputs["same"].num_cached_tokens, outputs["other"].num_cached_tokens) == (8, 0)


def test_audio_takes_as_many_positions_as_the_encoder_makes_states_of_it() -> None:
    frames = WireTensor("float32", (2, 30), array("f", [0.25] * 60).tobytes())
    clip = features_for_encoder(frames, num_positions=15)
    scheduler = encoder_scheduler()
    add_encoded(scheduler, "a", 4, clip)
    plan, _ = step(scheduler)
    (encoder_step,) = plan.encoder_steps
    assert encoder_step.encoder_input.features is frames and len(encoder_step.block_ids) == 4
    assert new_of(plan, "a").num_encoder_positions == 15


# ---- the encoder's budget ----


def test_an_input_that_is_too_long_for_the_rest_of_the_budget_waits_and_nobody_overtakes_it() -> None:
    scheduler = encoder_scheduler(max_num_encoder_tokens=10)
    add_encoded(scheduler, "a", 4, 6)
    add_encoded(scheduler, "b", 4, 6)
    add_encoded(scheduler, "c", 4, 3)  # there would be room for it
    plan, _ = step(scheduler)
    assert new_ids(plan) == ["a"]
    plan, _ = step(scheduler)
    assert new_ids(plan) == ["b", "c"] and list(encoder_blocks(plan)) == ["b", "c"]
    assert plan.num_scheduled_tokens == {"a": 1, "b": 4, "c": 4}  # running branches go on meanwhile


def test_an_input_that_is_longer_than_the_budget_runs_alone() -> None:
    scheduler = encoder_scheduler(max_num_encoder_tokens=5)
    for name, length in {"a": 3, "long": 40, "c": 1}.items():
        add_encoded(scheduler, name, 4, length)
    assert [list(encoder_blocks(step(scheduler)[0])) for _ in range(3)] == [["a"], ["long"], ["c"]]


def test_inputs_that_are_there_cost_nothing_of_the_budget() -> None:
    scheduler = encoder_scheduler(max_num_encoder_tokens=6)
    add_encoded(scheduler, "a", 4, document(6))
    add_encoded(scheduler, "b", 4, document(6))
    add_encoded(scheduler, "c", 4, document(1, number=9))
    assert new_ids(step(scheduler)[0]) == ["a", "b"]
    assert new_ids(step(scheduler)[0]) == ["c"]


def test_a_try_that_found_no_memory_leaves_the_budget_as_it_was() -> None:
    """Two leases are evicted for it one by one, with a new try each time in the same step."""
    scheduler = encoder_scheduler(num_blocks=13, lease_fraction=1.0, max_num_encoder_tokens=16)
    for name in "ab":
        add_encoded(scheduler, name, 12, 4, retain_kv=1000.0, max_tokens=1)
    finish(scheduler)
    assert len(scheduler.leases) == 2 and scheduler.kv_cache.num_free_blocks == 4
    add_encoded(scheduler, "c", 20, 16, max_tokens=1)
    plan, _ = step(scheduler)
    assert new_ids(plan) == ["c"] and list(encoder_blocks(plan)) == ["c"]
    assert len(scheduler.leases) == 0


# ---- memory ----


def test_leases_give_way_to_a_cross_table_where_that_is_enough() -> None:
    scheduler = encoder_scheduler(num_blocks=11, lease_fraction=1.0)
    add_encoded(scheduler, "kept", 8, 4, retain_kv=1000.0, max_tokens=1)
    finish(scheduler)
    assert len(scheduler.leases) == 1 and scheduler.kv_cache.num_free_blocks == 7
    add_encoded(scheduler, "a", 4, 20, max_tokens=4)  # five blocks and two
    step(scheduler)
    assert len(scheduler.leases) == 1
    add_encoded(scheduler, "b", 4, 20, max_tokens=4)  # three are kept, and none is free
    plan, _ = step(scheduler)
    assert new_ids(plan) == [] and plan.encoder_steps == []
    assert len(scheduler.leases) == 1, "it would not be enough"
    assert scheduler.state.branches["b"].cross is None and plan.num_scheduled_tokens == {"a": 1}
    finish(scheduler)
    add_encoded(scheduler, "c", 4, 28, max_tokens=4)  # seven blocks and two
    assert new_ids(step(scheduler)[0]) == ["c"] and len(scheduler.leases) == 0


def test_who_waits_for_the_memory_of_its_table_comes_in_when_others_have_ended() -> None:
    scheduler = encoder_scheduler(num_blocks=9)
    add_encoded(scheduler, "a", 4, 16, max_tokens=3)
    add_encoded(scheduler, "b", 4, 16, max_tokens=3)
    plans = finish(scheduler)
    assert [list(encoder_blocks(plan)) for plan in plans] == [["a"], [], [], ["b"], [], [], []]
    assert [new_ids(plan) for plan in plans[:4]] == [["a"], [], [], ["b"]]


def test_a_table_that_was_evicted_is_written_again() -> None:
    scheduler = encoder_scheduler(num_blocks=9)
    add_encoded(scheduler, "a", 4, document(12), max_tokens=1)
    finish(scheduler)
    add_encoded(scheduler, "b", 20, 4, max_tokens=4)  # seven blocks of eight
    finish(scheduler)
    add_encoded(scheduler, "c", 4, document(12), max_tokens=1)
    assert list(encoder_blocks(step(scheduler)[0])) == ["c"]
    assert scheduler.stats().num_encoder_runs == 3


# ---- what is refused ----


def refuse(request: EngineCoreRequest, field: str, match: str, **settings: object) -> None:
    scheduler = encoder_scheduler(**settings)
    with pytest.raises(RequestError, match=match) as refused:
        scheduler.add_request(request)
    assert refused.value.field == field
    assert not scheduler.has_requests()
    scheduler.check()


def test_an_input_that_can_never_fit_is_refused_by_name() -> None:
    refuse(encoded("a", 4, 40), "encoder_prompt", "needs 10 blocks", num_blocks=11)
    refuse(encoded("a", 6, 36, max_tokens=1), "prompt", "pool has 1 beside its encoder input", num_blocks=11)
    refuse(encoded("a", 2, 36, max_tokens=9), "max_tokens", "at most 2 for this prompt", num_blocks=11)
    refuse(encoded("a", 4, 20, width=4, max_tokens=8), "beam_width", "the pool has 5", num_blocks=11)
    refuse(encoded("a", 2, 36, max_tokens=1), "encoder_prompt", "needs 9 blocks", num_blocks=11, num_groups=2)
    scheduler = encoder_scheduler(num_blocks=11)
    add_encoded(scheduler, "a", 2, 36, max_tokens=2)
    assert [len(plan.encoder_steps) for plan in finish(scheduler)] == [1, 0, 0]


def test_a_model_without_an_encoder_refuses_an_input_and_one_with_an_encoder_asks_for_it() -> None:
    refuse(encoded("a", 4, 4), "encoder_input", "no encoder", cross=None)
    refuse(request_of("a", 4), "encoder_input", "is missing")


@pytest.mark.parametrize(
    "encoder_input",
    [
        EncoderInput(0, b"x" * 32, token_ids=[]),
        EncoderInput(4, b"x" * 32),
        EncoderInput(1, b"x" * 32, token_ids=[1], features=WireTensor("uint8", (1,), b"1")),
    ],
)
def test_an_input_is_tokens_or_features_and_not_empty(encoder_input: EncoderInput) -> None:
    refuse(encoded("a", 4, encoder_input), "encoder_input", "is empty, or is tokens and features at once")


def test_a_decoder_alone_is_not_disturbed() -> None:
    scheduler = encoder_scheduler(cross=None)
    add(scheduler, "a", 6)
    plan, _ = step(scheduler)
    assert plan.encoder_steps == [] and new_of(plan, "a").cross_block_ids == []
    assert new_of(plan, "a").num_encoder_positions == 0
