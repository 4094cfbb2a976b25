"""Which sampling rates are those of sound, wherever they are written: in a file, or by a caller."""

from __future__ import annotations

import operator
from typing import Any

from ratoon.core.errors import RequestError

LOWEST_RATE, HIGHEST_RATE = 1_000, 768_000


def verify_rate(rate: Any) -> int:
    """RequestError for anything but samples a second. From fewer than this, a file of no size would become hours."""
    try:
        value = None if isinstance(rate, bool) else operator.index(rate)
    except TypeError:
        value = None
    if value is None or not LOWEST_RATE <= value <= HIGHEST_RATE:
        expected = f"a whole number of samples a second, from {LOWEST_RATE} to {HIGHEST_RATE}"
        raise RequestError("file", f"the sampling rate is {rate!r}", expected)
    return value
