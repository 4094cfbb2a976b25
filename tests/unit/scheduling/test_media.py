"""Images in prompts: when the encoder runs over them, where chunks end, and which blocks are shared."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ratoon.core.errors import RequestError
from ratoon.core.media import RopePositions, cut_features
from ratoon.core.params import BeamSearchParams, PoolingParams
from ratoon.core.plan import EmbeddingSpan, InputOverrides
from ratoon.core.request import EngineCoreRequest, Extraction
from ratoon.core.speculation import SpeculationConfig
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.encoding import answer_to, finish, step
from tests.unit.scheduling.seeing import Part, runs, seeing, seeing_scheduler
from tests.unit.scheduling.steps import answer_of


def add(scheduler: Scheduler, request_id: str, *parts: Part, **rest: Any) -> EngineCoreRequest:
    request = seeing(request_id, *parts, **rest)
    scheduler.add_request(request)
    return request


# ---- when the encoder runs ----


def test_an_image_runs_with_the_first_chunk_that_reads_it_and_its_rows_stand_in_the_plan() -> None:
    scheduler = seeing_scheduler()
    request = seeing("a", 3, ("cat", 5), 2)
    request.rope = RopePositions(bytes(4 * 3 * 10), -4)
    scheduler.add_request(request)
    plan, _ = step(scheduler)
    assert plan.scheduled_encoder_inputs == {"cat": request.mm_features[0].data}
    (new,) = plan.scheduled_new_reqs
    assert new.overrides == InputOverrides(bytes(120), -4, [EmbeddingSpan(3, 5, "cat")])
    plan, _ = step(scheduler)
    assert runs(plan) == [] and plan.sampled_req_ids == ["a"]


def test_thirty_two_requests_over_one_image_run_the_encoder_once() -> None:
    scheduler = seeing_scheduler(num_blocks=500, max_num_batched_tokens=60)
    for number in range(32):
        add(scheduler, f"r{number}", 2, ("cat", 20), 3, text=100 * number, max_tokens=3)
    plans = finish(scheduler)
    assert sum(len(runs(plan)) for plan in plans) == 1
    assert scheduler.stats().num_encoder_runs == 1
    add(scheduler, "later", 1, ("cat", 20), 1)
    assert runs(step(scheduler)[0]) == []


def test_an_image_under_another_salt_runs_again() -> None:
    scheduler = seeing_scheduler()
    for name, salt in (("a", None), ("b", "x"), ("c", "y"), ("d", "x")):
        add(scheduler, name, 2, ("cat", 5), 1, salt=salt)
    plan, _ = step(scheduler)
    assert len(runs(plan)) == 3
    keys = {new.req_id: new.overrides.embeddings[0].key for new in plan.scheduled_new_reqs}
    assert keys["a"] == "cat" and keys["b"] == keys["d"] and len(set(keys.values())) == 3


def test_inputs_beyond_the_budget_of_a_step_wait_and_the_chunk_ends_before_them() -> None:
    scheduler = seeing_scheduler(max_num_encoder_tokens=8)
    add(scheduler, "a", 2, ("cat", 5), 2)
    add(scheduler, "b", 4, ("dog", 4), 2)
    add(scheduler, "c", 3, ("bird", 3), 2)
    plan, _ = step(scheduler)
    assert runs(plan) == ["cat", "bird"], "what fits is not held up by what does not"
    assert plan.num_scheduled_tokens == {"a": 9, "b": 4, "c": 8}
    plan, _ = step(scheduler)
    assert runs(plan) == ["dog"] and plan.num_scheduled_tokens == {"a": 1, "c": 1, "b": 6}


def test_an_input_longer_than_the_budget_runs_alone() -> None:
    scheduler = seeing_scheduler(max_num_encoder_tokens=4)
    add(scheduler, "a", ("cat", 9), 1)
    add(scheduler, "b", 1, ("dog", 2), 1)
    plan, _ = step(scheduler)
    assert runs(plan) == ["cat"] and plan.num_scheduled_tokens == {"a": 10, "b": 1}
    assert runs(step(scheduler)[0]) == ["dog"]


def test_rows_that_a_request_brought_need_no_budget_of_the_encoder() -> None:
    scheduler = seeing_scheduler(max_num_encoder_tokens=4)
    add(scheduler, "a", ("cat", 4), 1)
    add(scheduler, "b", ("words", 12))
    plan, _ = step(scheduler)
    assert runs(plan) == ["cat", "words"] and plan.sampled_req_ids == ["a", "b"]
    assert scheduler.stats().num_encoder_runs == 1


def test_a_full_cache_cuts_the_chunk_and_drops_what_no_request_reads() -> None:
    scheduler = seeing_scheduler(cache_size=10, max_num_batched_tokens=12)
    add(scheduler, "a", 8, ("cat", 8), 2, max_tokens=1)
    plan, _ = step(scheduler)
    assert runs(plan) == ["cat"] and plan.num_scheduled_tokens == {"a": 12}, "a cut image keeps its rows"
    add(scheduler, "b", 3, ("dog", 6), text=500, max_tokens=1)
    plan, _ = step(scheduler)
    assert runs(plan) == [] and plan.num_scheduled_tokens == {"a": 6, "b": 3}
    plan, _ = step(scheduler)
    assert runs(plan) == ["dog"] and plan.free_encoder_mm_hashes == ["cat"] and plan.num_scheduled_tokens == {"b": 6}


def test_a_causal_prompt_may_be_cut_within_an_image_which_runs_once() -> None:
    scheduler = seeing_scheduler(max_num_batched_tokens=5)
    add(scheduler, "a", 2, ("cat", 11), 3, ("dog", 4), 1)
    plans = [step(scheduler)[0] for _ in range(5)]
    assert [list(plan.num_scheduled_tokens.values()) for plan in plans] == [[5], [5], [5], [5], [1]]
    assert [runs(plan) for plan in plans] == [["cat"], [], [], ["dog"], []]


def test_a_step_failed_and_its_image_runs_again() -> None:
    scheduler = seeing_scheduler()
    add(scheduler, "a", 2, ("cat", 5), 2)
    add(scheduler, "b", 4, text=700)
    plan = scheduler.schedule()
    assert scheduler.step_failed(plan, "it burns") == []
    scheduler.check()
    again = [step(scheduler)[0] for _ in range(2)]
    seen = next(plan for plan in again if "a" in plan.num_scheduled_tokens)
    assert runs(seen) == ["cat"]
    assert "cat" in [key for plan in again for key in plan.free_encoder_mm_hashes], "whatever became of it"


def test_an_image_that_makes_every_step_fail_fails_its_request_alone() -> None:
    scheduler = seeing_scheduler()
    add(scheduler, "a", 2, ("cat", 5), 2, max_tokens=2)
    add(scheduler, "b", 2, ("dog", 5), 2, text=300, max_tokens=2)
    ended = []
    for _ in range(12):
        plan = scheduler.schedule()
        if "dog" in runs(plan):
            outputs = scheduler.step_failed(plan, "a broken image")
        else:
            outputs = scheduler.update_from_output(plan, answer_of(plan))
        scheduler.check()
        ended += [(output.request_id, output.error) for output in outputs if output.finished]
        if not scheduler.has_unfinished_requests():
            break
    assert dict(ended) == {"a": None, "b": "a broken image"}


def test_a_request_that_runs_alone_gets_room_from_those_that_wait() -> None:
    """Those hold images that they are in the middle of."""
    scheduler = seeing_scheduler(cache_size=10, max_num_batched_tokens=8)
    add(scheduler, "a", 2, ("cat", 9), 3)
    step(scheduler)  # within its image
    suspect = seeing("b", 2, ("dog", 8), 2, text=300)
    scheduler.add_request(suspect)
    request = scheduler.state.requests["b"]
    scheduler.state.quarantined["b"] = request
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 2} and runs(plan) == []
    plan, _ = step(scheduler)
    assert runs(plan) == ["dog"] and plan.preempted_req_ids == ["a"]


# ---- images that are computed in one step ----


def test_an_image_attended_in_both_directions_runs_in_one_step() -> None:
    scheduler = seeing_scheduler(max_num_batched_tokens=10, whole_images=True)
    add(scheduler, "a", 4, ("cat", 8), 3, ("dog", 7), 1)
    plans = [step(scheduler)[0] for _ in range(4)]
    assert [list(plan.num_scheduled_tokens.values()) for plan in plans] == [[4], [10], [9], [1]]
    assert [runs(plan) for plan in plans] == [[], ["cat"], ["dog"], []]


def test_prompts_of_embeddings_are_cut_as_text_is() -> None:
    scheduler = seeing_scheduler(max_num_batched_tokens=10, whole_images=True)
    add(scheduler, "a", ("words", 14))
    assert [list(step(scheduler)[0].num_scheduled_tokens.values()) for _ in range(2)] == [[10], [4]]


def test_decodes_beside_it_leave_an_image_to_a_later_step() -> None:
    scheduler = seeing_scheduler(max_num_batched_tokens=10, whole_images=True)
    add(scheduler, "text", 3, max_tokens=3, text=800)
    step(scheduler)
    add(scheduler, "a", ("cat", 10), 1)
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"text": 1}
    step(scheduler)
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 10} and runs(plan) == ["cat"]


def test_the_last_row_of_an_image_at_the_end_of_a_prompt_is_computed_with_the_image() -> None:
    """A hit must leave a token to compute, and that would be within the image."""
    scheduler = seeing_scheduler(whole_images=True)
    add(scheduler, "a", 4, ("cat", 4), max_tokens=1)
    step(scheduler)
    add(scheduler, "b", 4, ("cat", 4), max_tokens=1)
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 4} and outputs["b"].num_cached_tokens == 4


# ---- what is shared ----


def test_a_prompt_whose_image_is_in_the_prefix_cache_needs_no_encoder() -> None:
    scheduler = seeing_scheduler(cache_size=8)
    add(scheduler, "a", 2, ("cat", 7), 4, max_tokens=1)
    add(scheduler, "other", ("dog", 8), max_tokens=1)
    finish(scheduler)  # the rows of the first are gone
    add(scheduler, "b", 2, ("cat", 7), 4, max_tokens=1)
    plan, outputs = step(scheduler)
    assert runs(plan) == [] and outputs["b"].num_cached_tokens == 12
    add(scheduler, "c", 2, ("bird", 7), 4, max_tokens=1)
    plan, outputs = step(scheduler)
    assert runs(plan) == ["bird"] and outputs["c"].num_cached_tokens == 0, "the same tokens, another image"


@pytest.mark.parametrize(("whole_images", "expected"), [(False, 8), (True, 4)])
def test_a_hit_ends_in_no_image_that_is_computed_in_one_step(whole_images: bool, expected: int) -> None:
    """Of ten tokens with an image from 5 to 9 inclusive, two blocks are full."""
    scheduler = seeing_scheduler(whole_images=whole_images)
    add(scheduler, "a", 5, ("cat", 5), 1, max_tokens=1)
    step(scheduler)
    add(scheduler, "b", 5, ("cat", 5), 3, text=50, max_tokens=1)
    plan, outputs = step(scheduler)
    assert outputs["b"].num_cached_tokens == expected and runs(plan) == []


def test_choices_and_beams_read_the_image_of_their_prompt_without_a_run() -> None:
    scheduler = seeing_scheduler()
    add(scheduler, "a", 2, ("cat", 5), 2, n=3, max_tokens=3)
    search = seeing("s", 2, ("cat", 5), 3, text=300)
    search.params = BeamSearchParams(beam_width=2, n=1, max_tokens=3)
    scheduler.add_request(search)
    plans = finish(scheduler)
    assert [runs(plan) for plan in plans if runs(plan)] == [["cat"]]
    sent = {new.req_id: new.overrides for plan in plans for new in plan.scheduled_new_reqs}
    assert sent.keys() == {"a", "a#1", "a#2", "s"}
    assert all(overrides.embeddings == [EmbeddingSpan(2, 5, "cat")] for overrides in sent.values())


def test_a_vector_of_a_prompt_with_an_image() -> None:
    scheduler = seeing_scheduler(max_num_batched_tokens=6)
    request = seeing("a", 2, ("cat", 5), 2)
    request.params = PoolingParams(pooling="mean")
    scheduler.add_request(request)
    plans = finish(scheduler)
    assert [runs(plan) for plan in plans][:2] == [["cat"], []] and plans[1].pooled_req_ids == ["a"]


def continued(parent: EngineCoreRequest, at: int, suffix: list[int], **rest: Any) -> EngineCoreRequest:
    request = seeing("child", 1, **rest)
    tokens = [*parent.prompt_token_ids, 7, 7][:at]
    request.prompt_token_ids, request.continuation_token_ids = tokens + suffix, suffix
    request.continuation_of = parent.request_id
    request.mm_features = cut_features(parent.mm_features, at)
    return request


@pytest.mark.parametrize(("at", "num_computed", "run"), [(11, 10, []), (9, 9, []), (4, 4, []), (2, 2, [])])
def test_a_continuation_shares_the_memory_of_an_image_also_where_it_is_cut(
    at: int, num_computed: int, run: list[str]
) -> None:
    scheduler = seeing_scheduler(cache_size=6)
    parent = add(scheduler, "a", 2, ("cat", 5), 2, max_tokens=2, retain_kv=100.0)
    add(scheduler, "other", ("dog", 6), max_tokens=1, text=900)
    finish(scheduler)
    scheduler.add_request(continued(parent, at, [70, 71]))
    plan, outputs = step(scheduler)
    assert outputs["child"].num_cached_tokens == num_computed and runs(plan) == run


def test_a_continuation_whose_parent_is_forgotten_runs_the_encoder_again() -> None:
    scheduler = seeing_scheduler(cache_size=6)
    parent = seeing("a", 2, ("cat", 5), 2)
    scheduler.add_request(continued(parent, 4, [70, 71]))
    plan, _ = step(scheduler)
    assert runs(plan) == ["cat"] and plan.num_scheduled_tokens == {"child": 6}
    assert plan.scheduled_new_reqs[0].overrides.embeddings == [EmbeddingSpan(2, 2, "cat")], "the first rows of it"


def test_a_preempted_prompt_runs_its_image_again_only_if_its_rows_are_gone() -> None:
    for cache_size, expected in ((100, []), (6, ["cat"])):
        scheduler = seeing_scheduler(num_blocks=7, cache_size=cache_size, caching=False)
        add(scheduler, "a", 4, max_tokens=12)
        add(scheduler, "b", 1, ("cat", 6), 1, max_tokens=8, text=600)
        step(scheduler)
        plans = []
        while not any(plan.preempted_req_ids == ["b"] for plan in plans):
            plans.append(step(scheduler)[0])
        scheduler.state.media.cache.schedule("other", "dog", seeing("c", ("dog", 5)).mm_features[0].data)
        scheduler.state.media.cache.take_scheduled()
        scheduler.state.media.cache.release("other")
        resumed = next(plan for plan in finish(scheduler) if "b" in [new.req_id for new in plan.scheduled_new_reqs])
        assert runs(resumed) == expected


def test_a_prompt_that_was_swapped_out_within_an_image_goes_on_there() -> None:
    scheduler = seeing_scheduler(num_blocks=9, num_host_blocks=20, cache_size=20, max_num_batched_tokens=3)
    add(scheduler, "a", 8, max_tokens=14)
    add(scheduler, "b", 2, ("cat", 20), 1, max_tokens=4, text=600)
    plans = []
    while not any(plan.preempted_req_ids == ["b"] for plan in plans):
        plans.append(step(scheduler)[0])
    num_computed = sum(plan.num_scheduled_tokens.get("b", 0) for plan in plans)
    assert 2 < num_computed < 22, "within the image"
    dog = seeing("c", ("dog", 5)).mm_features[0].data
    assert scheduler.state.media.cache.schedule("other", "dog", dog), "it holds nothing while it waits"
    scheduler.state.media.cache.release("other")
    later = finish(scheduler)
    ((resumed, new),) = [(plan, new) for plan in later for new in plan.scheduled_new_reqs]
    assert (new.req_id, new.num_computed_tokens, runs(resumed)) == ("b", num_computed, ["cat"])


# ---- hidden states ----


def extraction(request_id: str, positions: list[int], parent: EngineCoreRequest) -> EngineCoreRequest:
    request = msgspec.structs.replace(parent, request_id=request_id, params=Extraction(positions, [0, 2]))
    request.prompt_token_ids = parent.prompt_token_ids[: positions[-1] + 1]
    request.mm_features = cut_features(parent.mm_features, positions[-1] + 1)
    return request


def test_hidden_states_of_an_image_need_its_rows_again_even_if_keys_and_values_are_there() -> None:
    scheduler = seeing_scheduler(cache_size=6)
    parent = add(scheduler, "a", 2, ("cat", 6), 5, max_tokens=1)
    add(scheduler, "other", ("dog", 6), max_tokens=1, text=900)
    finish(scheduler)
    scheduler.add_request(extraction("x", [1, 3, 11], parent))
    plan, _ = step(scheduler)
    assert runs(plan) == ["cat"]
    (capture,) = plan.captures
    assert capture.overrides == InputOverrides(embeddings=[EmbeddingSpan(2, 6, "cat")])
    assert capture.spans == [(1, 1, False), (3, 1, False), (8, 4, True)]
    scheduler.add_request(extraction("y", [1, 10, 11], parent))
    plan, _ = step(scheduler)
    assert runs(plan) == [] and plan.captures[0].spans == [(1, 1, False), (8, 4, True)]


def test_hidden_states_of_an_image_seen_in_both_directions_are_read_with_the_rows_behind_them() -> None:
    scheduler = seeing_scheduler(whole_images=True)
    parent = add(scheduler, "a", 2, ("cat", 6), 5, max_tokens=1, retain_kv=100.0)
    finish(scheduler)
    reading = extraction("x", [3, 5, 9], parent)
    reading.continuation_of, reading.continuation_token_ids = "a", []
    scheduler.add_request(reading)
    plan, _ = step(scheduler)
    assert plan.captures[0].spans == [(3, 5, False), (9, 1, False)] and plan.captures[0].captured == [0, 2, 5]


def test_an_extraction_that_has_no_room_for_its_image_waits() -> None:
    scheduler = seeing_scheduler(cache_size=6, max_num_batched_tokens=6)
    add(scheduler, "a", ("dog", 6), 2, text=900)
    parent = seeing("p", 2, ("cat", 6), 2)
    scheduler.add_request(seeing("b", 3, ("bird", 5), 1, text=400))
    scheduler.add_request(extraction("x", [9], parent))
    plans = finish(scheduler)
    assert {key for plan in plans for key in runs(plan)} == {"dog", "bird", "cat"}


def test_an_extraction_within_an_image_goes_on_while_the_first_one_waits_for_its_room() -> None:
    scheduler = seeing_scheduler(cache_size=15, max_num_batched_tokens=8, max_steps_in_flight=2)
    scheduler.add_request(extraction("first", [15], seeing("p", 8, ("cat", 6), 2)))
    scheduler.add_request(extraction("second", [13], seeing("q", ("dog", 12), 2, text=400)))
    in_flight = [scheduler.schedule(), scheduler.schedule()]
    assert [plan.captures[0].req_id for plan in in_flight] == ["first", "second"]
    for plan in in_flight:
        scheduler.update_from_output(plan, answer_to(plan))
    plan, _ = step(scheduler)
    assert [capture.req_id for capture in plan.captures] == ["second"], "it holds the room that the first one needs"
    assert {key for plan in finish(scheduler) for key in runs(plan)} == {"cat"}


# ---- speculation ----


def test_the_device_drafts_nothing_behind_prompts_with_images() -> None:
    scheduler = seeing_scheduler(speculation=SpeculationConfig(speculate="draft:x", num_tokens=3, max_seqs=8))
    add(scheduler, "a", 2, ("cat", 5), 2, max_tokens=6)
    add(scheduler, "b", 4, text=900, max_tokens=6)
    plans = finish(scheduler)
    assert {name for plan in plans for name in plan.draft_lengths} == {"b"}


# ---- what is refused ----


@pytest.mark.parametrize(
    ("config", "parts", "message"),
    [
        ({"cache_size": 6}, [2, ("cat", 7), 1], "part 1 makes 7 rows of embeddings, and 6 are kept"),
        (
            {"whole_images": True, "max_num_batched_tokens": 6},
            [2, ("cat", 7), 1],
            "part 1 takes 7 tokens of one step, which holds 6; an engine with a greater max_num_batched_tokens",
        ),
        (
            {"whole_images": True, "max_num_batched_tokens": 60, "max_prefill_chunk": 5},
            [2, ("cat", 7), 1],
            "greater max_prefill_chunk",
        ),
        (
            {"cache_size": 9, "enable_chunked_prefill": False},
            [("cat", 7), ("dog", 3)],
            "10 rows of embeddings are read in one step, and 9 are kept",
        ),
    ],
)
def test_images_that_can_never_run_are_refused(config: dict[str, Any], parts: list[Part], message: str) -> None:
    with pytest.raises(RequestError, match="multi_modal_data") as error:
        add(seeing_scheduler(**config), "a", *parts)
    assert message in str(error.value)


@pytest.mark.parametrize(("offset", "length"), [(1, 5), (8, 3), (4, 0), (4, 6)])
def test_places_that_overlap_or_lie_outside_of_the_prompt_are_refused(offset: int, length: int) -> None:
    request = seeing("a", ("cat", 4), ("dog", 5), 1)
    request.mm_features[1].offset, request.mm_features[1].length = offset, length
    with pytest.raises(RequestError, match=r"mm_features\[1\]"):
        seeing_scheduler().add_request(request)


def test_an_image_that_is_computed_in_one_step_cannot_be_cut() -> None:
    request = seeing("a", ("cat", 4), 1)
    request.mm_features[0].length = 3
    with pytest.raises(RequestError, match="both directions"):
        seeing_scheduler(whole_images=True).add_request(request)


def test_without_chunked_prefill_the_images_of_a_prompt_run_in_one_step() -> None:
    scheduler = seeing_scheduler(max_num_encoder_tokens=6, enable_chunked_prefill=False)
    add(scheduler, "a", 1, ("cat", 5), ("dog", 5), 1)
    add(scheduler, "b", 1, ("bird", 2), ("fish", 2), 1, text=700)
    plan, _ = step(scheduler)
    assert runs(plan) == ["cat", "dog"] and plan.num_scheduled_tokens == {"a": 12}
    plan, _ = step(scheduler)
    assert runs(plan) == ["bird", "fish"]


# ---- the cache is reset ----


def test_a_reset_drops_what_the_encoder_made() -> None:
    scheduler = seeing_scheduler()
    add(scheduler, "a", 2, ("cat", 5), 2, max_tokens=2)
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    finish(scheduler)
    assert scheduler.reset_prefix_cache()
    add(scheduler, "b", 2, ("cat", 5), 2)
    plan, _ = step(scheduler)
    assert plan.free_encoder_mm_hashes == ["cat"] and runs(plan) == ["cat"]
