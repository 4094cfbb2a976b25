"""Leases that give way move down a tier, say so, and keep their promise as far as the tier can."""

from __future__ import annotations

import pytest

from ratoon.core.request import EngineCoreRequest, InheritedFrom
from ratoon.memory.block_pool import FIRST
from ratoon.memory.sessions import SessionKey
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.memory.test_sessions import Index
from tests.unit.scheduling.encoding import encoder_scheduler, finish, step
from tests.unit.scheduling.steps import request_of

TOKENS = 7  # that a fake runner samples


def make(num_host_blocks: int, lease_fraction: float = 0.3, num_blocks: int = 31) -> Scheduler:
    return encoder_scheduler(num_blocks, num_host_blocks, cross=None, lease_fraction=lease_fraction)


def parent(scheduler: Scheduler, name: str, first: int, now: float = 0.0, **options: object) -> list[int]:
    """A text of 24 tokens, of which 23 are computed, in five full blocks of four and one that is not full. Leased."""
    request = request_of(name, [first + place for place in range(20)], max_tokens=4)
    request.retain_kv = 60.0
    for field, value in options.items():
        setattr(request, field, value)
    scheduler.add_request(request, now)
    finish(scheduler)
    return [*request.prompt_token_ids, *[TOKENS] * 4]


def continuation(name: str, of: str, tokens: list[int]) -> EngineCoreRequest:
    request = request_of(name, [*tokens, 1, 2], max_tokens=1)
    request.continuation_of, request.continuation_token_ids = of, [1, 2]
    return request


def places(scheduler: Scheduler) -> dict[str, str]:
    leases = scheduler.leases
    return {lease.branch_id: "device" for lease in leases} | {one.branch_id: str(one.place) for one in leases.moved()}


def evict_from_device(scheduler: Scheduler) -> None:
    """A request that takes all blocks that nothing holds."""
    scheduler.add_request(request_of("large", scheduler.kv_cache.num_free_blocks * 4 - 1, max_tokens=1))
    finish(scheduler)


def test_a_lease_that_a_newer_one_takes_the_budget_from_moves_to_host_memory_and_is_continued_there():
    scheduler = make(num_host_blocks=20)
    tokens = parent(scheduler, "a", 100)
    parent(scheduler, "b", 200)
    assert places(scheduler) == {"b": "device", "a": "host"}
    stats = scheduler.stats().leases
    assert (stats.num_active, stats.num_in_host_memory, stats.moved, stats.evicted) == (1, 1, 1, 0)
    evict_from_device(scheduler)
    scheduler.add_request(continuation("child", "a", tokens))
    plans = []
    while "child" not in (found := step(scheduler))[1]:
        plans.append(found[0])
    output = found[1]["child"]
    assert output.inherited_from == InheritedFrom.HOST and output.num_cached_tokens == 20
    assert found[0].num_scheduled_tokens == {"child": 6}, "the block that is not full, and the suffix"
    assert sum(len(plan.loads) for plan in plans) == 5
    assert scheduler.stats().leases.continued == 1


def test_pressure_moves_a_lease_too_and_its_time_ends_there():
    scheduler = make(num_host_blocks=20, num_blocks=13, lease_fraction=0.5)
    parent(scheduler, "a", 100)
    scheduler.add_request(request_of("large", 40, max_tokens=1))
    finish(scheduler)
    assert places(scheduler) == {"a": "host"}
    assert scheduler.next_expiry() == 60.0
    scheduler.tick(60.0)
    assert places(scheduler) == {} and scheduler.stats().leases.expired == 1
    scheduler.check()
    assert scheduler.kv_cache.num_free_slots == 20


def test_a_lease_in_host_memory_gives_way_to_newer_ones_and_goes_on_to_files_or_ends():
    for has_files in (True, False):
        scheduler = make(num_host_blocks=11)  # half of it for leases: one of them
        if has_files:
            scheduler.kv_cache.store.connect(Index())
        for number, name in enumerate("abc"):
            parent(scheduler, name, 100 * (number + 1))
        expected = {"c": "device", "b": "host"} | ({"a": "files"} if has_files else {})
        assert places(scheduler) == expected
        stats = scheduler.stats().leases
        assert (stats.moved, stats.num_in_files, stats.evicted) == (2, int(has_files), int(not has_files))
        scheduler.check()


def test_a_lease_in_host_memory_gives_its_slots_to_what_needs_them():
    scheduler = make(num_host_blocks=10)
    parent(scheduler, "a", 100)
    parent(scheduler, "b", 200)
    assert places(scheduler) == {"b": "device", "a": "host"} and scheduler.kv_cache.num_free_slots == 5
    store, pool = scheduler.kv_cache.store, scheduler.kv_cache.pool
    slots = store.keep([(pool.blocks[number], None, 0) for number in range(1, 8)])
    assert slots is not None and places(scheduler) == {"b": "device"}
    store.release(slots)


def test_without_host_memory_a_lease_ends_as_before():
    scheduler = make(num_host_blocks=0)
    tokens = parent(scheduler, "a", 100)
    parent(scheduler, "b", 200)
    assert places(scheduler) == {"b": "device"} and scheduler.stats().leases.evicted == 1
    scheduler.add_request(continuation("child", "a", tokens))
    assert step(scheduler)[1]["child"].inherited_from == InheritedFrom.PREFIX_CACHE


def test_ending_a_lease_and_all_leases_frees_slots():
    scheduler = make(num_host_blocks=20)
    for number, name in enumerate("abc"):
        parent(scheduler, name, 100 * (number + 1))
    assert places(scheduler) == {"c": "device", "a": "host", "b": "host"}
    assert scheduler.leases.end("a") and not scheduler.leases.end("a")
    assert scheduler.reset_prefix_cache()
    assert places(scheduler) == {} and scheduler.kv_cache.num_free_slots == 20
    scheduler.check()


@pytest.mark.parametrize("retain_kv", [None, 60.0])
def test_a_turn_supersedes_the_text_before_it_and_its_lease_goes_first_when_it_ends(retain_kv):
    scheduler = make(num_host_blocks=0, lease_fraction=0.9)
    key: SessionKey = ("ada", None, "talk")
    first = request_of("first", list(range(300, 308)), max_tokens=8)
    second = request_of("second", [*range(300, 308), *range(400, 412)], max_tokens=4)  # the answer rendered anew
    for request in (first, second):
        request.owner, request.session, request.retain_kv = "ada", "talk", retain_kv
        scheduler.add_request(request, 0.0)
        finish(scheduler)
    sessions = scheduler.kv_cache.sessions
    assert sessions.newest(key) == ["second"] and sessions.newest((None, None, "talk")) == []
    assert scheduler.stats().sessions.superseded == 1
    scheduler.tick(60.0)  # leases end
    scheduler.check()
    # 30 blocks: five of the second text, three more of the first, of which one is only its own and hashed
    num_first = sum(block.zone == FIRST for block in scheduler.kv_cache.pool.blocks)
    assert num_first == 1
