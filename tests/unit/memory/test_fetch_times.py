import pytest

from ratoon.memory.fetch_times import FORGOTTEN, FetchTimes


def test_what_was_never_observed_is_tried():
    assert FetchTimes().estimate(500) == 0.0


def test_a_slow_first_fetch_of_few_blocks_does_not_prevent_one_of_many():
    times = FetchTimes()
    times.note(2, 0.14)  # the first of an engine, most of which is no time of the blocks
    assert times.estimate(512) == pytest.approx(0.14)
    times.note(512, 0.2)
    assert times.estimate(512) == pytest.approx(0.2)


def test_estimates_lie_between_those_of_fewer_and_more_blocks():
    times = FetchTimes()
    times.note(4, 0.1)
    times.note(1024, 1.024)
    assert times.estimate(256) == pytest.approx(0.256)
    assert times.estimate(16) == pytest.approx(0.1)  # not less than what four take
    assert times.estimate(2) == pytest.approx(0.05)  # at best


def test_estimates_follow_what_is_observed_and_lose_weight_where_they_prevent_fetches():
    times = FetchTimes()
    times.note(16, 1.6)
    times.note(16, 3.2)
    assert times.estimate(16) == pytest.approx(2.0)
    times.forget_a_little()
    assert times.estimate(16) == pytest.approx(2.0 * FORGOTTEN)
    assert times.estimate(0) == 0.0
