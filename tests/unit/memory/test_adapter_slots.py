"""Slots for adapters: which one is taken for the next adapter, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.core.adapters import Adapter, AdapterLoad, AdapterReport
from ratoon.memory.adapter_slots import AdapterSlots

A, B, C = (Adapter(name * 32, f"/{name}", 8) for name in "abc")


def load(slots: AdapterSlots, adapter: Adapter) -> int:
    assert slots.load(adapter)
    (announced,) = slots.take_loads()
    assert announced.adapter == adapter
    slots.take_report(AdapterReport([announced.slot]))
    return announced.slot


def test_an_adapter_can_be_held_once_it_is_reported() -> None:
    slots = AdapterSlots(2)
    assert slots.load(A)
    assert slots.take_loads() == [AdapterLoad(0, A)]
    assert slots.hold(A.digest) is None
    assert slots.take_report(AdapterReport([0])) == ([A.digest], {})
    assert slots.hold(A.digest) == 0
    slots.check({0: 1})


def test_the_adapter_that_was_used_longest_ago_gives_way() -> None:
    slots = AdapterSlots(2)
    load(slots, A)
    load(slots, B)
    slots.release(slots.hold(A.digest), last_step=0)
    assert load(slots, C) == 1
    assert slots.has(A.digest) and not slots.has(B.digest)
    assert slots.num_evicted == 1


def test_a_held_slot_is_not_taken() -> None:
    slots = AdapterSlots(1)
    load(slots, A)
    slots.hold(A.digest)
    assert not slots.load(B)


def test_a_slot_is_not_overwritten_while_a_step_in_flight_reads_it() -> None:
    slots = AdapterSlots(1)
    load(slots, A)
    slots.release(slots.hold(A.digest), last_step=7)
    slots.step_done(6)
    assert not slots.load(B)
    slots.step_done(7)
    assert slots.load(B)


def test_a_slot_whose_adapter_failed_is_free_again() -> None:
    slots = AdapterSlots(1)
    assert slots.load(A)
    assert slots.take_report(AdapterReport(failed={0: "no such file"})) == ([], {A.digest: "no such file"})
    slots.take_loads()
    assert load(slots, B) == 0
    assert slots.num_failed == 1


def test_what_is_not_known_to_be_loaded_is_announced_again_after_a_failed_step() -> None:
    slots = AdapterSlots(2)
    load(slots, A)
    slots.load(B)
    slots.take_loads()
    slots.send_again()
    assert slots.take_loads() == [AdapterLoad(1, B)]
    slots.take_report(AdapterReport([1]))
    assert slots.take_report(AdapterReport([1])) == ([], {})  # twice: the second time it is no news
    assert slots.num_loads == 2


def test_more_releases_than_holds_are_an_error() -> None:
    slots = AdapterSlots(1)
    load(slots, A)
    with pytest.raises(AssertionError, match="released more often"):
        slots.release(0, 0)


@given(st.lists(st.tuples(st.sampled_from(["load", "hold", "release", "report", "fail", "step"]), st.integers(0, 5))))
def test_slots_add_up_whatever_happens(events: list[tuple[str, int]]) -> None:
    adapters = [Adapter(f"{number:032x}", f"/{number}", 8) for number in range(6)]
    slots = AdapterSlots(3)
    held: dict[int, int] = {}
    under_way: list[int] = []
    last_read: dict[int, int] = {}
    step = 0
    for event, number in events:
        adapter = adapters[number]
        if event == "load" and not slots.has(adapter.digest) and slots.load(adapter):
            (announced,) = slots.take_loads()
            assert not held.get(announced.slot) and last_read.get(announced.slot, 0) <= step
            under_way.append(announced.slot)
        elif event == "hold" and (slot := slots.hold(adapter.digest)) is not None:
            assert slot not in under_way
            held[slot] = held.get(slot, 0) + 1
        elif event == "release" and held.get(number):
            held[number] -= 1
            last_read[number] = step + 2
            slots.release(number, step + 2)
        elif event in ("report", "fail") and under_way:
            slot = under_way.pop(0)
            slots.take_report(AdapterReport([slot]) if event == "report" else AdapterReport(failed={slot: "why"}))
        elif event == "step":
            step += 1
            slots.step_done(step)
        slots.check(held)
    assert slots.num_loaded + len(under_way) <= 3
