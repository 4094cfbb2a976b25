import pytest

from ratoon.memory.fetch_times import FORGOTTEN, NUM_RECENT, FetchTimes


def observed(*fetches: tuple[int, float]) -> FetchTimes:
    """Each of these (blocks, seconds) was observed twice."""
    times = FetchTimes()
    for num_blocks, seconds in fetches:
        times.note(num_blocks, seconds)
        times.note(num_blocks, seconds)
    return times


def test_what_was_never_observed_is_tried():
    assert FetchTimes().estimate(500) == 0.0


def test_a_single_slow_fetch_prevents_none():
    times = FetchTimes()
    times.note(6, 3.0)  # the first of an engine, or one beside much other work
    assert times.estimate(6) == times.estimate(500) == 0.0
    times.note(6, 0.3)
    assert times.estimate(6) == pytest.approx(0.3)


def test_a_slow_fetch_of_few_blocks_does_not_prevent_one_of_many():
    times = observed((2, 0.14))
    assert times.estimate(512) == pytest.approx(0.14)
    times.note(512, 0.2)
    times.note(512, 0.2)
    assert times.estimate(512) == pytest.approx(0.2)


def test_estimates_lie_between_those_of_fewer_and_more_blocks():
    times = observed((4, 0.1), (1024, 1.024))
    assert times.estimate(256) == pytest.approx(0.256)
    assert times.estimate(16) == pytest.approx(0.1)  # not less than what four take
    assert times.estimate(2) == pytest.approx(0.05)  # at best


def test_estimates_follow_what_is_observed_and_lose_weight_where_they_prevent_fetches():
    times = observed((16, 1.6))
    for _ in range(NUM_RECENT - 1):
        times.note(16, 3.2)
        assert times.estimate(16) == pytest.approx(1.6)
    times.note(16, 3.2)
    assert times.estimate(16) == pytest.approx(3.2), "all of late were as slow"
    times.forget_a_little()
    assert times.estimate(16) == pytest.approx(3.2 * FORGOTTEN)
    assert times.estimate(0) == 0.0
