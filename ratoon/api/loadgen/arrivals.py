"""When requests arrive: the moments of a random process, from a seed. Knows no clock."""

from __future__ import annotations

import math
import random


def arrival_times(count: int, rate: float, burstiness: float, source: random.Random) -> list[float]:
    """Seconds from the beginning for each of `count` arrivals, `rate` a second on average; the first comes at once.

    Gaps are gamma distributed. Burstiness 1 is a Poisson process (as many independent users make it), lower comes in
    bursts, higher is more even. An infinite rate is all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += source.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times
