from __future__ import annotations

import pytest

from ratoon.observe.startup import StartupTimer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


def test_phases_and_what_none_of_them_accounts_for_add_up():
    clock = Clock()
    timer = StartupTimer(clock)
    clock.spend(1)
    with timer.phase("load weights"):
        clock.spend(2)
        with timer.phase("read"):
            clock.spend(3)
    timer.finish()
    clock.spend(100)
    assert timer.as_dict() == {"load weights": 5, "load weights / read": 3, "other": 1, "total": 6}
    assert timer.total_seconds == 6


def test_a_phase_that_fails_is_counted():
    clock = Clock()
    timer = StartupTimer(clock)

    def fail_slowly() -> None:
        with timer.phase("x"):
            clock.spend(2)
            raise ValueError

    with pytest.raises(ValueError):
        fail_slowly()
    with timer.phase("y"):
        clock.spend(1)
    assert timer.as_dict() == {"x": 2, "y": 1, "other": 0, "total": 3}


def test_the_table_shows_shares_and_nesting():
    clock = Clock()
    timer = StartupTimer(clock)
    with timer.phase("outer"), timer.phase("inner"):
        clock.spend(2)
    clock.spend(2)
    timer.finish()
    lines = timer.table().splitlines()
    assert [line.split()[0] for line in lines] == ["outer", "inner", "other", "total"]
    assert lines[1].startswith("  inner")
    assert "50%" in lines[0] and "100%" in lines[-1]


def test_a_phase_that_is_entered_twice_is_one_row():
    clock = Clock()
    timer = StartupTimer(clock)
    with timer.phase("start"):
        for name in ("import torch", "load", "import torch"):
            with timer.phase(name):
                clock.spend(1)
    with timer.phase("start"), timer.phase("more"):
        clock.spend(1)
    timer.finish()
    names = [line[: len("  import torch")].rstrip() for line in timer.table().splitlines()]
    assert names == ["start", "  import torch", "  load", "  more", "other", "total"]
    assert timer.as_dict()["start / import torch"] == 2


def test_what_another_process_spent_elsewhere_is_not_a_second_other():
    clock = Clock()
    timer = StartupTimer(clock)
    with timer.phase("start the engine"):
        clock.spend(3)
        timer.include([("load weights", 0, 2.0), ("other", 0, 1.0)])
    timer.finish()
    assert timer.as_dict() == {
        "start the engine": 3, "start the engine / load weights": 2, "other": 0, "total": 3
    }  # fmt: skip
