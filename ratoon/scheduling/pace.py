"""How long steps take by their number of tokens, as observed: how large may a step be that must not take too long?

No device is described here. A step on a CPU takes twice as long with twice the tokens; on a GPU hundreds of tokens take
as long as one. Beyond what was observed, time is taken to grow in proportion, so a limit that is too low rises from
step to step until the observed times say otherwise. The clock is the caller's.

Tokens of prompts whose log-probabilities are read take longer than others: what each takes in addition is estimated
apart from the rest of its step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection
from statistics import median_low

LEAST_OF_TOKEN = 0.1  # of the mean time of a step's tokens: what one of them takes at least
ABOUT = 0.95  # of a time or number: as much as makes no difference
NUM_RECENT = 8  # observations of each size; a step can be slow for many reasons, so the shortest counts


class StepPace:
    def __init__(self) -> None:
        self._recent: dict[int, deque[tuple[float, int]]] = {}  # seconds and tokens, by size
        # Tokens and seconds, both ascending: between two of these points time grows evenly
        self._tokens: list[int] = []
        self._seconds: list[float] = []
        self._read: deque[float] = deque(maxlen=NUM_RECENT)  # seconds that a token took in addition, because it is read
        # Steps in flight: when they were planned, tokens to read, and seconds without any step before the plan
        self._planned: dict[int, tuple[float, int, float | None]] = {}
        self._last_done = 0.0
        self._idle: dict[int, deque[float]] = {}  # the last of these, by the size of the step

    def planned(self, step: int, now: float, num_read: int = 0) -> None:
        """`num_read`: the tokens of prompts whose log-probabilities are read in it."""
        self._planned[step] = now, num_read, None if self._planned else now - self._last_done

    def done(self, step: int, num_tokens: int, now: float) -> None:
        """Steps are executed in order: one begins when it is planned, or when the one before it is done."""
        planned, num_read, idle = self._planned.pop(step, (now, 0, None))
        if idle is not None and num_tokens > 0:
            self._idle.setdefault(_size_of(num_tokens), deque(maxlen=NUM_RECENT)).append(idle)
        began = max(planned, self._last_done)
        self._last_done = now
        if num_tokens > 0 and now > began:
            self.observe(num_tokens, now - began, num_read)

    def skipped(self) -> None:
        """Forgets the steps in flight, which all failed."""
        self._planned.clear()

    def observe(self, num_tokens: int, seconds: float, num_read: int = 0) -> None:
        if num_read and self._seconds:
            self._read.append(max(0.0, seconds - self.seconds(num_tokens)) / num_read)
            # At least what a step without anything to read is known to take
            seconds = max(seconds - num_read * self._seconds_of_read, min(seconds, self.seconds(num_tokens)))
        recent = self._recent.setdefault(_size_of(num_tokens), deque(maxlen=NUM_RECENT))
        before = _point_of(recent) if recent else None
        recent.append((seconds, num_tokens))
        if _point_of(recent) != before:
            self._estimate()

    def seconds(self, num_tokens: int) -> float:
        """The estimated duration of a step. A smaller one than any that was observed takes no longer than that."""
        tokens, seconds = self._tokens, self._seconds
        index = bisect_right(tokens, num_tokens)
        if index == 0:
            return seconds[0]
        if index == len(tokens):
            return seconds[-1] * num_tokens / tokens[-1]
        share = (num_tokens - tokens[index - 1]) / (tokens[index] - tokens[index - 1])
        return seconds[index - 1] + share * (seconds[index] - seconds[index - 1])

    def seconds_of_token(self, num_tokens: int) -> float | None:
        """The estimated time of each token in a step of so many. None: no step was observed."""
        return self.seconds(num_tokens) / num_tokens if self._seconds else None

    def seconds_of_rows(self, num_tokens: int) -> float | None:
        """Returns the estimated duration of a step, if one of at most this size and at least a quarter of it was
        observed, else None."""
        index = bisect_right(self._tokens, num_tokens)
        return None if index == 0 or self._tokens[index - 1] * 4 < num_tokens else self.seconds(num_tokens)

    def idle_seconds(self, num_tokens: int) -> float:
        """Returns what the host takes from a result to the plan of a step of about that size, while the device has
        nothing to do. The least of late counts, since an engine may also have had no requests."""
        if not self._idle:
            return 0.0
        size = _size_of(num_tokens)
        return min(self._idle[min(self._idle, key=lambda each: max(each / size, size / each))])

    def has_observed(self, num_tokens: int) -> bool:
        """Whether a step was observed that had about so many tokens, or up to twice as many."""
        index = bisect_left(self._tokens, num_tokens * ABOUT)
        return index < len(self._tokens) and self._tokens[index] <= 2 * num_tokens

    def cost_of_read(self, num_tokens: int) -> float:
        """What a token that is read costs in a step of so many tokens, in tokens that are not: 1 or more."""
        if not self._seconds:
            return 1.0
        seconds = self.seconds(num_tokens)
        beyond_one = (seconds - self.seconds(1)) / max(1, num_tokens - 1)
        return 1.0 + self._seconds_of_read / max(beyond_one, LEAST_OF_TOKEN * seconds / num_tokens)

    @property
    def _seconds_of_read(self) -> float:
        return median_low(self._read) if self._read else 0.0

    def cost_of_rows(self, num_tokens: int, num_further: int) -> float | None:
        """What each of some further tokens adds to a step of so many, in the mean time of its tokens: 1 where time
        grows in proportion, 0 where it does not grow. None: no step of about that size was observed."""
        index = bisect_right(self._tokens, num_tokens)
        if index == len(self._tokens) or self._tokens[index] > 4 * (num_tokens + num_further):
            return None
        seconds = self.seconds(num_tokens)
        # Up to a size that was observed
        further = min(max(num_further, self._tokens[index] - num_tokens), self._tokens[-1] - num_tokens)
        return num_tokens * (self.seconds(num_tokens + further) - seconds) / (further * seconds)

    def largest_within(self, ratio: float, num_tokens: int, most: int) -> int:
        """The tokens of the largest step, of at most `most`, that takes up to `ratio` times as long as one of
        `num_tokens`. Without any observation: `most`."""
        if not self._seconds:
            return most
        limit = ratio * self.seconds(num_tokens)
        tokens, seconds = self._tokens, self._seconds
        index = bisect_right(seconds, limit)  # points from here on take longer
        if index == 0:
            largest = num_tokens
        elif index == len(seconds):
            largest = int(tokens[-1] * limit / seconds[-1])
        else:
            share = (limit - seconds[index - 1]) / (seconds[index] - seconds[index - 1])
            largest = tokens[index - 1] + int(share * (tokens[index] - tokens[index - 1]))
        return min(max(largest, num_tokens), most)

    def _estimate(self) -> None:
        """A larger step takes no less time, and no more than in proportion: what seems to contradict this was
        disturbed, such as a step in which a kernel was compiled."""
        points = sorted(map(_point_of, self._recent.values()))
        self._tokens = [num_tokens for num_tokens, _ in points]
        at_most = [seconds for _, seconds in points]
        for index in range(len(points) - 2, -1, -1):
            at_most[index] = min(at_most[index], at_most[index + 1])
        for index in range(1, len(points)):
            in_proportion = at_most[index - 1] * self._tokens[index] / self._tokens[index - 1]
            at_most[index] = min(at_most[index], in_proportion)
        self._seconds = at_most


def _point_of(recent: Collection[tuple[float, int]]) -> tuple[int, float]:
    """The tokens of the largest of these steps that took about as long as the shortest, and the seconds of that one."""
    least = min(seconds for seconds, _ in recent)
    return max(num_tokens for seconds, num_tokens in recent if seconds * ABOUT <= least), least


def _size_of(num_tokens: int) -> int:
    """Observations of similar steps are kept together, by the largest of them: 1, 2, 3, 4, 6, 8, 12, 16, … Where steps
    are padded, to a power of two say, those of a size take about the same time."""
    power = 1 << max(num_tokens - 1, 0).bit_length()
    return power - power // 4 if 4 * num_tokens <= 3 * power else power
