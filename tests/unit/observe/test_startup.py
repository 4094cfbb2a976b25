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
