"""When requests arrive: reproducible, at the wanted rate, as bursty as wanted."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from ratoon.benchmarks.loadgen.run import arrival_times


def gaps(burstiness: float, rate: float = 10.0, count: int = 20_000) -> list[float]:
    times = arrival_times(count, rate, burstiness, random.Random(1))
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_the_same_seed_gives_the_same_moments():
    first, second, other = (arrival_times(50, 3.0, 1.0, random.Random(seed)) for seed in (7, 7, 8))
    assert first == second != other
    assert first[0] == 0.0 and first == sorted(first)


def test_an_infinite_rate_is_all_at_once():
    assert arrival_times(3, math.inf, 1.0, random.Random(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_rate_is_kept_and_the_gaps_spread_as_the_burstiness_says(burstiness):
    found = gaps(burstiness)
    mean = statistics.fmean(found)
    assert mean == pytest.approx(0.1, rel=0.05)
    # A gamma distribution of shape k has a coefficient of variation of 1/sqrt(k); Poisson arrivals have 1.
    assert statistics.pstdev(found) / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
