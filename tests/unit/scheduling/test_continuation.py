"""Continuations and leases: what is inherited, counted in scheduled tokens, and that memory always adds up."""

from __future__ import annotations

import logging

import pytest

from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.errors import RequestError
from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreRequest, FinishReason, InheritedFrom
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.steps import BLOCK_SIZE, add, new_ids, request_of, scheduler_of, step


def make(num_blocks: int = 100, lease_fraction: float = 0.5, caching: bool = True, **config) -> Scheduler:
    groups = (KVCacheGroup(FullAttentionSpec(BLOCK_SIZE, 1, 8, "float16"), (0,)),)
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=caching, lease_fraction=lease_fraction)
    return Scheduler(SchedulerConfig(**config), cache, KVCacheConfig(num_blocks, BLOCK_SIZE, groups), 200)


def parent_request(
    name: str, length: int, max_tokens: int, retain_kv: float | None = 60.0, **options
) -> EngineCoreRequest:
    request = request_of(name, length, max_tokens=max_tokens, **options)
    request.retain_kv = retain_kv
    return request


def continuation(name: str, parent: str, tokens: list[int], suffix: list[int], **options) -> EngineCoreRequest:
    request = request_of(name, tokens + suffix, **{"max_tokens": 3, **options})
    request.continuation_of = parent
    request.continuation_token_ids = suffix
    return request


def run(scheduler: Scheduler) -> dict[str, list[int]]:
    """Run to the end; the tokens of each request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(300):
        if not scheduler.has_requests():
            return tokens
        for (name, _), output in step(scheduler)[1].items():
            tokens.setdefault(name, []).extend(output.new_token_ids)
    raise AssertionError("no end")


def finished_parent(scheduler: Scheduler, length: int = 10, max_tokens: int = 5, **options) -> list[int]:
    """A parent that has ended; its tokens."""
    request = parent_request("parent", length, max_tokens, **options)
    scheduler.add_request(request)
    return request.prompt_token_ids + run(scheduler)["parent"]


@pytest.mark.parametrize("length", range(1, 14))
def test_a_leased_continuation_computes_its_suffix_and_one_token(length):
    """At every offset in a block, caching or not: the parent's last token was never computed, the rest was."""
    for caching in (True, False):
        scheduler = make(caching=caching)
        tokens = finished_parent(scheduler, length, 4)
        scheduler.add_request(continuation("child", "parent", tokens, [1, 2, 3]))
        plan, outputs = step(scheduler)
        assert plan.num_scheduled_tokens == {"child": 4}
        output = outputs["child", 0]
        assert output.inherited_from == InheritedFrom.LEASE and output.num_cached_tokens == len(tokens) - 1
        assert len(run(scheduler)["child"]) == 2
        scheduler.leases.end_all()
        scheduler.check()
        assert scheduler.kv_cache.num_free_blocks == scheduler.kv_cache.num_usable_blocks


def test_the_tail_is_copied_and_what_the_parent_left_is_not_written():
    scheduler = make()
    tokens = finished_parent(scheduler, 10, 5)  # 14 computed: two tokens in the last block
    kept = scheduler.leases.find("parent")
    before = [block.block_id for block in kept.block_tables[0]]
    for child in ("a", "b"):
        scheduler.add_request(continuation(child, "parent", tokens, [1]))
    plan, _ = step(scheduler)
    assert [(copy.req_id, copy.src) for copy in plan.block_copies] == [("a", before[3]), ("b", before[3])]
    tables = {new.req_id: new.block_ids[0] for new in plan.scheduled_new_reqs}
    assert tables["a"][:3] == tables["b"][:3] == before[:3]
    assert len({tables["a"][3], tables["b"][3], before[3]}) == 3
    run(scheduler)
    assert [block.block_id for block in kept.block_tables[0]] == before


@pytest.mark.parametrize(("retain_kv", "num_inherited"), [(60.0, 14), (None, 12)], ids=["lease", "prefix cache"])
def test_inherited_tokens_are_prefix_cache_hits(retain_kv, num_inherited):
    scheduler = make()
    tokens = finished_parent(scheduler, 10, 5, retain_kv=retain_kv)
    before = scheduler.stats().prefix_cache
    scheduler.add_request(continuation("child", "parent", tokens, [1, 2, 3]))
    step(scheduler)
    after = scheduler.stats().prefix_cache
    assert (after.queries - before.queries, after.hits - before.hits) == (len(tokens) + 3, num_inherited)


def test_inheritance_is_logged_for_who_looks_for_it(caplog):
    scheduler = make()
    tokens = finished_parent(scheduler, 10, 5)
    with caplog.at_level(logging.DEBUG, logger="ratoon.scheduling"):
        scheduler.add_request(continuation("child", "parent", tokens, [1, 2, 3]))
        step(scheduler)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.getMessage() == "child continues parent: inherited 14 of 18 prompt tokens (lease)"


def test_an_empty_suffix_goes_on_where_the_parent_stopped():
    scheduler = make()
    tokens = finished_parent(scheduler)
    scheduler.add_request(continuation("child", "parent", tokens, []))
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"child": 1} and outputs["child", 0].inherited_from == InheritedFrom.LEASE


@pytest.mark.parametrize("at", range(1, 15))
def test_any_earlier_token_of_the_parent_can_be_continued(at):
    scheduler = make()
    tokens = finished_parent(scheduler, 10, 5)
    scheduler.add_request(continuation("child", "parent", tokens[:at], [1, 2]))
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"child": 2}
    assert outputs["child", 0].num_cached_tokens == at
    run(scheduler)


def test_any_choice_of_the_parent_can_be_continued():
    scheduler = make()
    request = parent_request("parent", 10, 5, n=3)
    scheduler.add_request(request)
    run(scheduler)
    assert len(scheduler.leases) == 3
    for choice, parent in enumerate(("parent", "parent#1", "parent#2")):
        tokens = scheduler.leases.find(parent).token_ids
        scheduler.add_request(continuation(f"child{choice}", parent, tokens, [5]))
    plan, _ = step(scheduler)
    assert set(plan.num_scheduled_tokens.values()) == {2}
    run(scheduler)


def test_a_parent_that_runs_can_be_forked_at_its_newest_token():
    scheduler = make()
    request = parent_request("parent", 10, 30, retain_kv=None)
    scheduler.add_request(request)
    for _ in range(4):
        step(scheduler)
    tokens = list(scheduler.state.requests["parent"].branches[0].token_ids)
    scheduler.add_request(continuation("child", "parent", tokens, [1, 2]))
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"parent": 1, "child": 3}
    assert outputs["child", 0].inherited_from == InheritedFrom.LEASE
    done = run(scheduler)
    assert len(done["parent"]) == 25 and len(done["child"]) == 2


def test_what_a_parent_is_given_in_this_very_step_is_shared_and_never_copied():
    """Its prefix hits may be blocks that another request writes only in this step: a copy would come before that."""
    scheduler = make()
    prompt = list(range(2 * BLOCK_SIZE))
    scheduler.add_request(request_of("first", [*prompt, 1], max_tokens=3))
    scheduler.add_request(request_of("parent", [*prompt, 2], max_tokens=3))
    scheduler.add_request(continuation("child", "parent", prompt[: BLOCK_SIZE + 1], [3, 3]))
    plan, _ = step(scheduler)
    computed = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
    assert computed == {"first": 0, "parent": 2 * BLOCK_SIZE, "child": BLOCK_SIZE}
    assert plan.block_copies == []


def test_continuations_of_continuations_inherit_everything():
    scheduler = make()
    tokens = finished_parent(scheduler)
    parent = "parent"
    for number in range(5):
        child = continuation(f"child{number}", parent, tokens, [1, 2])
        child.retain_kv = 60.0
        scheduler.add_request(child)
        plan, outputs = step(scheduler)
        assert plan.num_scheduled_tokens == {f"child{number}": 3}
        first = outputs[f"child{number}", 0].new_token_ids
        tokens = child.prompt_token_ids + first + run(scheduler)[f"child{number}"]
        parent = f"child{number}"


def test_without_a_lease_whole_blocks_may_be_found_and_it_is_said_so():
    scheduler = make()
    tokens = finished_parent(scheduler, 10, 5, retain_kv=None)
    assert len(scheduler.leases) == 0
    scheduler.add_request(continuation("child", "parent", tokens, [1, 2]))
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"child": 5}  # 12 of 15 tokens are in whole blocks
    assert outputs["child", 0].inherited_from == InheritedFrom.PREFIX_CACHE


def test_a_parent_that_is_gone_is_computed_again_and_it_is_said_so():
    scheduler = make()
    tokens = finished_parent(scheduler, retain_kv=None)
    assert scheduler.reset_prefix_cache()
    scheduler.add_request(continuation("child", "parent", tokens, [1, 2]))
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"child": 17}
    assert outputs["child", 0].inherited_from == InheritedFrom.RECOMPUTED


def test_it_is_said_once_and_of_continuations_alone():
    scheduler = make()
    tokens = finished_parent(scheduler)
    add(scheduler, "other", 5)
    scheduler.add_request(continuation("child", "parent", tokens, [1]))
    outputs = step(scheduler)[1]
    assert outputs["other", 0].inherited_from is None and outputs["child", 0].inherited_from is not None
    assert step(scheduler)[1]["child", 0].inherited_from is None


def test_it_is_said_of_a_request_that_ends_with_its_first_token():
    scheduler = make()
    tokens = finished_parent(scheduler)
    scheduler.add_request(continuation("child", "parent", tokens, [1], max_tokens=1, n=2))
    outputs = step(scheduler)[1]
    assert outputs["child", 0].finish_reason == FinishReason.LENGTH
    assert outputs["child", 0].inherited_from == InheritedFrom.LEASE
    assert not scheduler.state.inherited


@pytest.mark.parametrize("change", ["tokens", "salt"])
def test_another_sequence_or_another_tenant_inherits_nothing(change):
    scheduler = make()
    tokens = finished_parent(scheduler)
    if change == "tokens":
        child = continuation("child", "parent", [9, *tokens[1:]], [1])
    else:
        child = continuation("child", "parent", tokens, [1], salt="another")
    scheduler.add_request(child)
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"child": len(tokens) + 1}
    assert outputs["child", 0].inherited_from == InheritedFrom.RECOMPUTED


def test_a_preempted_continuation_inherits_again():
    scheduler = make(num_blocks=16, lease_fraction=0.9)
    tokens = finished_parent(scheduler, 10, 5)
    add(scheduler, "old", 20, max_tokens=30)
    step(scheduler)
    scheduler.add_request(continuation("child", "parent", tokens, [1, 2], max_tokens=20))
    done = run(scheduler)
    assert len(done["old"]) == 29 and len(done["child"]) == 20


# ---- leases ----


def test_a_lease_ends_with_its_time():
    scheduler = make()
    scheduler.tick(100.0)
    finished_parent(scheduler, retain_kv=10.0)
    scheduler.tick(109.9)
    assert len(scheduler.leases) == 1 and scheduler.leases.next_expiry() == 110.0
    scheduler.tick(110.0)
    assert len(scheduler.leases) == 0 and scheduler.leases.stats.expired == 1
    scheduler.check()
    assert scheduler.kv_cache.num_free_blocks == scheduler.kv_cache.num_usable_blocks


def test_a_lease_waits_for_a_continuation_that_is_on_its_way():
    scheduler = make(max_num_seqs=1)
    tokens = finished_parent(scheduler, retain_kv=10.0)
    add(scheduler, "busy", 5, max_tokens=4)
    step(scheduler)
    scheduler.add_request(continuation("child", "parent", tokens, [1]))
    scheduler.tick(1000.0)
    assert len(scheduler.leases) == 1
    for _ in range(3):
        plan, _ = step(scheduler)
    plan, outputs = step(scheduler)
    assert new_ids(plan) == ["child"] and outputs["child", 0].inherited_from == InheritedFrom.LEASE
    scheduler.tick(1000.0)
    assert len(scheduler.leases) == 0


def test_an_aborted_continuation_no_longer_holds_the_lease():
    scheduler = make(max_num_seqs=1)
    tokens = finished_parent(scheduler, retain_kv=10.0)
    add(scheduler, "busy", 5, max_tokens=4)
    step(scheduler)
    scheduler.add_request(continuation("child", "parent", tokens, [1]))
    scheduler.abort_requests(["child"])
    scheduler.tick(1000.0)
    assert len(scheduler.leases) == 0


def test_the_budget_full_the_oldest_lease_goes():
    scheduler = make(num_blocks=41, lease_fraction=0.5)  # 20 blocks
    for number in range(6):
        scheduler.add_request(parent_request(f"p{number}", 18, 3))  # 20 computed: 5 blocks each
        run(scheduler)
    assert [f"p{number}" for number in range(6) if scheduler.leases.find(f"p{number}")] == ["p2", "p3", "p4", "p5"]
    assert scheduler.leases.stats.evicted == 2
    scheduler.add_request(parent_request("huge", 100, 3))
    run(scheduler)
    assert scheduler.leases.find("huge") is None and scheduler.leases.stats.refused == 1


def test_choices_count_their_common_blocks_once():
    scheduler = make(num_blocks=41, lease_fraction=0.5)
    scheduler.add_request(parent_request("p", 16, 3, n=4))
    run(scheduler)
    assert len(scheduler.leases) == 4 and scheduler.leases.num_blocks == 4 + 4


def test_leases_never_starve_requests():
    scheduler = make(num_blocks=21, lease_fraction=1.0)
    for number in range(4):
        scheduler.add_request(parent_request(f"p{number}", 18, 3))
        run(scheduler)
    assert scheduler.kv_cache.num_free_blocks == 0
    add(scheduler, "big", 60, max_tokens=15)
    assert len(run(scheduler)["big"]) == 15
    assert scheduler.stats().num_preemptions == 0


def test_leases_are_not_given_up_in_vain():
    scheduler = make(num_blocks=31, lease_fraction=0.5)
    scheduler.add_request(parent_request("p", 18, 3))
    run(scheduler)
    add(scheduler, "running", 90, max_tokens=9)
    step(scheduler)
    add(scheduler, "waiting", 60, max_tokens=5)  # would not fit even without the lease
    step(scheduler)
    assert scheduler.leases.find("p") is not None
    run(scheduler)


def test_only_a_natural_end_is_leased():
    scheduler = make()
    for name in ("aborted", "failed"):
        scheduler.add_request(parent_request(name, 10, 50))
    step(scheduler)
    scheduler.abort_requests(["aborted"])
    outputs = scheduler.fail_requests(["failed"], "no")
    assert outputs[0].finish_reason == FinishReason.ERROR
    assert len(scheduler.leases) == 0


def test_a_reset_ends_leases_but_not_under_requests():
    scheduler = make()
    finished_parent(scheduler)
    add(scheduler, "busy", 5)
    step(scheduler)
    assert not scheduler.reset_prefix_cache() and len(scheduler.leases) == 1
    scheduler.abort_requests(["busy"])
    assert scheduler.reset_prefix_cache() and len(scheduler.leases) == 0


def test_a_window_that_has_moved_on_is_computed_again():
    groups = (KVCacheGroup(SlidingWindowSpec(BLOCK_SIZE, 1, 8, "float16", window=6), (0,)),)
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False)
    scheduler = Scheduler(SchedulerConfig(), cache, KVCacheConfig(50, BLOCK_SIZE, groups), 200)
    tokens = finished_parent(scheduler, 10, 12)
    scheduler.add_request(continuation("early", "parent", tokens[:6], [1]))
    scheduler.add_request(continuation("late", "parent", tokens, [1]))
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"early": 7, "late": 2}
    assert outputs["early", 0].inherited_from == InheritedFrom.RECOMPUTED
    run(scheduler)


@pytest.mark.parametrize(("suffix", "retain_kv"), [([1, 2], None), ([], 0.0), ([], -1.0), ([], float("nan"))])
def test_what_makes_no_sense_is_refused(suffix, retain_kv):
    scheduler = scheduler_of()
    request = EngineCoreRequest("r", [5, 6, 7], SamplingParams(), continuation_of="x", continuation_token_ids=suffix)
    request.retain_kv = retain_kv
    with pytest.raises(RequestError):
        scheduler.add_request(request)
    assert not scheduler.state.requests
