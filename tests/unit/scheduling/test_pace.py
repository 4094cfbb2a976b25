"""How large a step may be, from how long steps took."""

from __future__ import annotations

import pytest

from ratoon.scheduling.pace import NUM_RECENT, StepPace


def pace_of(fixed: float, each: float, sizes: tuple[int, ...] = (1, 2, 4, 8, 64, 512)) -> StepPace:
    """A machine on which a step takes `fixed` seconds, and `each` for every token."""
    pace = StepPace()
    for size in sizes:
        pace.observe(size, fixed + each * size)
    return pace


def test_without_observations_a_step_is_not_limited() -> None:
    assert StepPace().largest_within(2, 1, 2048) == 2048


def test_where_tokens_cost_time_a_step_of_twice_the_time_has_few_of_them() -> None:
    assert pace_of(fixed=0.004, each=0.005).largest_within(2, 1, 2048) in (2, 3)


def test_where_tokens_cost_nothing_a_step_of_twice_the_time_has_many() -> None:
    assert pace_of(fixed=0.010, each=0.00002).largest_within(2, 1, 2048) >= 256


def test_the_reference_always_fits() -> None:
    assert pace_of(fixed=0.004, each=0.005).largest_within(1, 300, 2048) >= 300
    assert pace_of(fixed=0.004, each=0.005).largest_within(2, 300, 256) == 256


def test_sizes_that_were_not_observed_are_tried_by_doubling() -> None:
    pace, fixed, each = StepPace(), 0.010, 0.00002
    size = 1
    for _number in range(12):
        pace.observe(size, fixed + each * size)
        largest = pace.largest_within(2, 1, 4096)
        assert largest <= 2 * max(size, 1), "nothing is known of larger steps"
        if largest == size:
            break
        size = largest
    assert 256 <= size <= 512, "a step of 500 tokens takes twice as long as one of one token"


def test_one_slow_step_is_no_measure() -> None:
    pace = pace_of(fixed=0.010, each=0.0, sizes=(1, 2, 3, 4))
    pace.observe(6, 2.0)  # a kernel was compiled
    assert pace.largest_within(2, 1, 2048) >= 6


def test_a_machine_that_has_become_slower_is_noticed() -> None:
    pace = pace_of(fixed=0.004, each=0.0001, sizes=(1, 32))
    before = pace.largest_within(2, 1, 2048)
    for _ in range(NUM_RECENT):
        pace.observe(32, 0.050)
    assert pace.largest_within(2, 1, 2048) < before


def test_time_may_grow_in_stairs() -> None:
    pace = StepPace()
    for num_tokens in (100, 128, 115, 160, 256, 200):  # padded to a power of two
        pace.observe(num_tokens, (0.0072 if num_tokens <= 128 else 0.0087) * (1 + 0.0001 * num_tokens))
    assert pace.seconds(128) == pytest.approx(0.0072, rel=0.02)
    assert pace.seconds(160) == pytest.approx(0.0087, rel=0.05)
    assert pace.has_observed(256) and not pace.has_observed(300)


def test_the_host_takes_longer_for_larger_steps() -> None:
    pace, now = StepPace(), 0.0
    assert pace.idle_seconds(32) == 0.0
    for step, (num_tokens, idle) in enumerate([(2, 0.0002), (256, 0.001), (256, 5.0), (250, 0.0012)]):
        pace.planned(step, now + idle)
        now += idle + 0.01
        pace.done(step, num_tokens, now)
    assert pace.idle_seconds(1) == pace.idle_seconds(8) == pytest.approx(0.0002)
    assert pace.idle_seconds(256) == pace.idle_seconds(100) == pytest.approx(0.001)
    pace.planned(9, now + 0.0001)
    pace.done(9, 0, now + 0.2)  # its time does not count, as that of a step whose graph was captured
    assert pace.idle_seconds(1) == pytest.approx(0.0002), "of a step whose size is not known"


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_step_lasts_from_the_end_of_the_one_before_it(in_flight: int) -> None:
    pace, now = StepPace(), 100.0
    for step in range(10):
        pace.planned(step, now if in_flight == 1 else now - 0.010)
        now += 0.010
        pace.done(step, 4, now)
    assert pace.seconds(4) == pytest.approx(0.010)


@pytest.mark.parametrize(("fixed", "each"), [(0.004, 0.005), (0.010, 0.00002)])
def test_what_tokens_take_because_they_are_read_is_estimated_apart(fixed: float, each: float) -> None:
    pace, each_read = pace_of(fixed, each), 0.002
    before = [pace.seconds(num_tokens) for num_tokens in (1, 8, 64, 512)]
    for _ in range(NUM_RECENT):
        pace.observe(64, fixed + 64 * each + 60 * each_read, num_read=60)
    assert [pace.seconds(num_tokens) for num_tokens in (1, 8, 64, 512)] == pytest.approx(before)
    cost = pace.cost_of_read(64)
    assert cost == pytest.approx(1 + each_read / max(each, 0.1 * (fixed + 64 * each) / 64))
    for _ in range(NUM_RECENT):  # one day it is as fast as others
        pace.observe(64, fixed + 64 * each, num_read=60)
    assert pace.cost_of_read(64) == pytest.approx(1)


def test_steps_that_read_are_all_that_is_known_where_there_are_no_others() -> None:
    pace = StepPace()
    assert pace.cost_of_read(64) == 1
    for _ in range(3):
        pace.observe(64, 0.5, num_read=60)
    assert (pace.seconds(64), pace.cost_of_read(64)) == (0.5, 1)


def test_steps_without_a_clock_teach_nothing() -> None:
    pace = StepPace()
    pace.planned(1, 0.0)
    pace.done(1, 4, 0.0)
    assert pace.largest_within(2, 1, 2048) == 2048
