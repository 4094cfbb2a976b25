"""Times of many streams to a few figures. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

from service.streams import Answer

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Percentiles:
    """In milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        ordered = sorted(seconds) or [0.0]
        return cls(*(1000 * ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.9, 0.99, 1.0)))

    def __str__(self) -> str:
        return f"{self.p50:.0f} / {self.p90:.0f} / {self.p99:.0f} / {self.max:.0f}"


@dataclass(frozen=True)
class StreamFigures:
    """What a group of streams saw."""

    num_streams: int
    num_events: int
    num_tokens: int
    seconds: float  # from the first request to the last event
    first_event: Percentiles  # from a stream's own request on
    gaps: Percentiles  # between events of a stream
    longest_silence: Percentiles  # of each stream: the longest time without an event, before the first one included
    duration_median: float  # seconds
    duration_max: float

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> StreamFigures:
        durations = [answer.event_times[-1] - answer.sent for answer in answers]
        silences = [gaps([answer.sent, *answer.event_times]) for answer in answers]
        return cls(
            num_streams=len(answers),
            num_events=sum(len(answer.event_times) for answer in answers),
            num_tokens=sum(answer.num_tokens for answer in answers),
            seconds=max(answer.event_times[-1] for answer in answers) - min(answer.sent for answer in answers),
            first_event=Percentiles.of([answer.event_times[0] - answer.sent for answer in answers]),
            gaps=Percentiles.of([gap for answer in answers for gap in gaps(answer.event_times)]),
            longest_silence=Percentiles.of([max(silence) for silence in silences]),
            duration_median=median(durations),
            duration_max=max(durations),
        )

    def lines(self) -> list[str]:
        slowest = self.duration_max / self.duration_median
        return [
            f"events         {self.num_events} with {self.num_tokens} tokens in {self.seconds:.2f} s: "
            f"{self.num_events / self.seconds:.0f} events/s, {self.num_tokens / self.seconds:.0f} tokens/s",
            f"first event    {self.first_event} ms (median / 90 % / 99 % / longest)",
            f"gaps           {self.gaps} ms",
            f"silence        {self.longest_silence} ms, the longest of each stream",
            f"slowest stream {self.duration_max:.2f} s, {slowest:.2f} × the median ({self.duration_median:.2f} s)",
        ]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]
