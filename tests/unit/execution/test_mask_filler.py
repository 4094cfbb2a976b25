"""Masks are filled by other threads; one that takes long holds up its own text alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ratoon.execution.grammar.interface import NUM_FAST_OF_TRUSTED, NUM_SLOW_OF_SLOW, GrammarCost
from ratoon.execution.rules.mask_filler import MaskFiller


class Mask:
    """Filled when its gate is open."""

    def __init__(self, cost: GrammarCost, gate: threading.Event | None = None) -> None:
        self.cost = cost
        self.is_filled = False
        self.gate = gate
        self.seconds: float | None = None

    def fill(self) -> None:
        if self.gate is not None:
            assert self.gate.wait(60)

    def note_seconds(self, seconds: float) -> None:
        self.seconds = seconds
        self.cost.note(seconds)


def trusted() -> GrammarCost:
    cost = GrammarCost()
    for _ in range(NUM_FAST_OF_TRUSTED):
        cost.note(0.0)
    assert cost.is_trusted
    return cost


def slow() -> GrammarCost:
    cost = GrammarCost()
    for _ in range(NUM_SLOW_OF_SLOW):
        assert not cost.is_slow
        cost.note(0.01)
    assert cost.is_slow
    return cost


def fill_each(masks: Sequence[Mask]) -> None:
    for mask in masks:
        mask.fill()


def test_a_mask_of_a_slow_grammar_is_not_waited_for_and_holds_up_no_other() -> None:
    filler, gate = MaskFiller(fill_each), threading.Event()
    stuck, others = Mask(slow(), gate), [Mask(trusted()), Mask(GrammarCost()), Mask(trusted())]
    filler.begin([stuck, *others])
    filler.wait_for_all(others)
    start = time.monotonic()
    filler.wait([stuck, *others])
    assert not stuck.is_filled and time.monotonic() - start < 30
    gate.set()
    filler.wait_for_all([stuck])
    assert stuck.is_filled


def test_new_grammars_are_measured_and_trusted_ones_filled_together() -> None:
    together: list[int] = []

    def fill_many(masks: Sequence[Mask]) -> None:
        together.append(len(masks))

    filler = MaskFiller(fill_many)
    new = Mask(GrammarCost())
    filler.begin([new])
    filler.wait_for_all([new])
    assert new.seconds is not None and not together
    many = [Mask(trusted()) for _ in range(5)]
    filler.begin(many)
    filler.wait_for_all(many)
    assert sum(together) == 5 and all(mask.seconds is None for mask in many)


def test_trusted_grammars_that_together_take_long_are_measured_again() -> None:
    now = [0.0]

    def fill_many(masks: Sequence[Mask]) -> None:
        now[0] += 1.0

    filler = MaskFiller(fill_many, clock=lambda: now[0])
    mask = Mask(trusted())
    filler.begin([mask])
    filler.wait_for_all([mask])
    assert not mask.cost.is_trusted and not mask.cost.is_slow


def test_texts_of_a_grammar_that_turns_out_slow_leave_the_queue_of_the_others() -> None:
    filler, gate = MaskFiller(fill_each), threading.Event()
    cost = GrammarCost()
    first, second = Mask(cost, gate), Mask(cost)
    behind = Mask(GrammarCost())
    filler.begin([first, second, behind])
    for _ in range(NUM_SLOW_OF_SLOW):
        cost.note(0.01)  # by other texts
    gate.set()
    filler.wait_for_all([first, second, behind])
    assert cost.is_slow


def test_a_mask_that_is_slow_now_and_then_is_the_machines_fault() -> None:
    cost = GrammarCost()
    for _ in range(20):
        cost.note(0.01)
        cost.note(0.002)
    assert not cost.is_slow
    for _ in range(NUM_SLOW_OF_SLOW):
        cost.note(0.01)
    assert cost.is_slow


def test_a_grammar_is_slow_until_it_was_fast_for_a_while() -> None:
    cost = slow()
    for _ in range(31):
        cost.note(0.0)
    assert cost.is_slow
    cost.note(0.0)
    assert not cost.is_slow and cost.is_trusted
