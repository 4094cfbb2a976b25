"""Owners of jobs take turns, and none has all places."""

from __future__ import annotations

from ratoon.core.turns import Turns


def begin_all(turns: Turns[str]) -> list[str]:
    begun = []
    while (found := turns.begin()) is not None:
        begun.append(found[1])
    return begun


def test_one_owner_has_all_places_but_one() -> None:
    turns: Turns[str] = Turns(3)
    for name in ("a1", "a2", "a3", "a4"):
        turns.add("a", name)
    assert begin_all(turns) == ["a1", "a2"]
    turns.add("b", "b1")
    turns.add("b", "b2")
    assert begin_all(turns) == ["b1"], "the last place is for others"
    assert len(turns) == 3 and turns.num_waiting_of("a") == 2 and turns.num_running_of("b") == 1


def test_owners_take_turns() -> None:
    turns: Turns[str] = Turns(1)
    for owner in "aabbc":
        turns.add(owner, owner)
    order = []
    while (found := turns.begin()) is not None:
        order.append(found[1])
        turns.end(found[0])
    assert order == ["a", "b", "c", "a", "b"]


def test_a_single_place_is_for_anyone() -> None:
    turns: Turns[str] = Turns(1)
    turns.add(None, "x")
    assert begin_all(turns) == ["x"] and begin_all(turns) == []
    turns.end(None)
    turns.add(None, "y")
    assert begin_all(turns) == ["y"] and turns.num_running_of(None) == 1


def test_what_waits_can_be_removed() -> None:
    turns: Turns[str] = Turns(2)
    for name in ("a1", "a2", "a3"):
        turns.add("a", name)
    assert begin_all(turns) == ["a1"]
    assert turns.remove("a", "a2") and not turns.remove("a", "a2") and not turns.remove("b", "a3")
    assert not turns.remove("a", "a1"), "it has begun"
    turns.end("a")
    assert begin_all(turns) == ["a3"]
    turns.add("b", "b1")
    assert turns.remove("b", "b1") and len(turns) == 0 and begin_all(turns) == []
