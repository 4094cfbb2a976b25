"""Dynamic time warping finds the cheapest way, by the plain definition, and the filter the plain median."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ratoon.transcription.alignment import SECONDS_OF_POSITION, median_filter, normalised, token_times, warp

costs_of = st.tuples(st.integers(1, 7), st.integers(1, 9)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.integers(-8, 8).map(float))
)


def cheapest(costs: np.ndarray) -> float:
    """The cost of the cheapest way, cell by cell."""
    found = np.full(costs.shape, np.inf)
    for row in range(costs.shape[0]):
        for column in range(costs.shape[1]):
            before = [
                found[row - up, column - left] for up, left in ((1, 1), (1, 0), (0, 1)) if row >= up and column >= left
            ]
            found[row, column] = costs[row, column] + (min(before) if row or column else 0.0)
    return float(found[-1, -1])


@given(costs_of)
def test_the_way_goes_from_corner_to_corner_in_single_steps_and_is_the_cheapest(costs: np.ndarray) -> None:
    rows, columns = warp(costs)
    assert (rows[0], columns[0]) == (0, 0)
    assert (rows[-1], columns[-1]) == (costs.shape[0] - 1, costs.shape[1] - 1)
    steps = {*zip(np.diff(rows).tolist(), np.diff(columns).tolist())}
    assert steps <= {(1, 1), (1, 0), (0, 1)}
    assert costs[rows, columns].sum() == cheapest(costs)  # whole numbers: sums are exact


@given(st.integers(1, 12), st.sampled_from([1, 3, 5, 7]), st.randoms(use_true_random=False))
def test_the_filter_gives_the_median_of_the_values_around(length: int, width: int, random) -> None:
    values = np.array([[random.randint(-9, 9) for _ in range(length)]], np.float32)
    found = median_filter(values, width)
    half = width // 2
    if length <= half:
        assert (found == values).all()
        return
    mirrored = [*values[0][half:0:-1], *values[0], *values[0][-2 : -2 - half : -1]] if half else [*values[0]]
    expected = [np.median(mirrored[place : place + width]) for place in range(length)]
    assert found[0].tolist() == expected


@given(st.integers(1, 6), st.integers(1, 40), st.randoms(use_true_random=False))
def test_times_never_fall_and_lie_in_the_recording(num_tokens: int, num_positions: int, random) -> None:
    generator = np.random.default_rng(random.randint(0, 2**32))
    times = token_times(generator.random((3, num_tokens, num_positions)))
    assert len(times) == num_tokens and times[0] == 0
    assert (np.diff(times) >= 0).all()
    assert times[-1] <= (num_positions - 1) * SECONDS_OF_POSITION + 1e-9


def test_tokens_that_attend_to_one_stretch_each_get_its_beginning() -> None:
    weights = np.full((2, 4, 100), 1e-4)
    for token, (start, stop) in enumerate([(0, 20), (20, 45), (45, 50), (50, 100)]):
        weights[:, token, start:stop] = 1 / (stop - start)
    assert np.allclose(token_times(weights), [0.0, 0.4, 0.9, 1.0], atol=2 * SECONDS_OF_POSITION)


def test_equal_tokens_and_no_positions_are_no_error() -> None:
    assert token_times(np.ones((2, 3, 0))).tolist() == [0.0, 0.0, 0.0]
    assert token_times(np.ones((2, 0, 5))).tolist() == []
    assert not normalised(np.ones((2, 3, 4))).any()
    assert np.isfinite(token_times(np.ones((1, 3, 5)))).all()
