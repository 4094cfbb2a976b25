"""The figures that are made from the records of requests. Arithmetic only: no clock, no network, no printing.

Times are seconds from the beginning of the round in records, and milliseconds in distributions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

PERCENTILES = (50, 90, 95, 99)


class RequestRecord(msgspec.Struct):
    """One request as the client saw it. A chunk is an event of the stream that brought at least one token."""

    session: int
    turn: int
    scheduled: float  # when it was due
    started: float = 0.0  # when it was
    ended: float | None = None
    chunk_times: list[float] = []
    chunk_tokens: list[int] = []
    num_prompt_tokens: int | None = None  # None: not reported
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    finish_reason: str | None = None
    error_kind: str | None = None
    error: str | None = None

    @property
    def succeeded(self) -> bool:
        return self.ended is not None and self.error_kind is None

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return self.chunk_times[0] - self.started if self.chunk_times else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first chunk: None for answers in one piece."""
        if len(self.chunk_times) < 2:
            return None
        num_later = self.num_output_tokens - self.chunk_tokens[0]
        return (self.chunk_times[-1] - self.chunk_times[0]) / num_later if num_later > 0 else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latency: the pauses between chunks, as a reader sees them."""
        return [later - earlier for earlier, later in zip(self.chunk_times, self.chunk_times[1:])]

    @property
    def e2e(self) -> float | None:
        return None if self.ended is None else self.ended - self.started


class Distribution(msgspec.Struct, frozen=True):
    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float
    std: float


class Goodput(msgspec.Struct, frozen=True):
    """Requests that met every limit: their share of all that ended, and how many a second."""

    share: float
    rate: float


class Summary(msgspec.Struct, kw_only=True):
    """The figures of one round. Throughputs count requests that succeeded."""

    seconds: float
    num_requests: int
    num_succeeded: int
    num_failed: int
    num_unfinished: int  # cut off by Ctrl-C
    errors: dict[str, int]  # by kind
    num_prompt_tokens: int
    num_output_tokens: int
    cached_share: float | None  # of prompt tokens; None: the server does not say
    tokens_per_chunk: float | None
    peak_concurrency: int
    max_lateness_ms: float  # how far the generator fell behind its own schedule
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    goodput: Goodput | None


def distribution(values: Iterable[float | None], scale: float = 1e3) -> Distribution | None:
    """Returns the distribution of the values that exist; None if there are none."""
    import numpy

    found = numpy.array([value * scale for value in values if value is not None])
    if not found.size:
        return None
    percentiles = numpy.percentile(found, PERCENTILES)
    return Distribution(*map(float, (found.mean(), *percentiles, found.min(), found.max(), found.std())))


def peak_concurrency(intervals: Iterable[tuple[float, float]]) -> int:
    """How many intervals overlap at most. One that begins as another ends does not overlap it."""
    changes = sorted(change for begin, end in intervals for change in ((begin, 1), (end, -1)))
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


def meets(record: RequestRecord, limits_ms: dict[str, float]) -> bool:
    """Whether a request kept within every limit. A measure that it does not have (a TPOT of one token) is kept."""
    if not record.succeeded:
        return False
    measured = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}
    return all(value is None or value * 1e3 <= limits_ms[name] for name, value in measured.items() if name in limits_ms)


def summarize(records: Sequence[RequestRecord], seconds: float, limits_ms: dict[str, float] | None = None) -> Summary:
    """`seconds` is how long the round took."""
    ended = [record for record in records if record.ended is not None]
    good = [record for record in ended if record.succeeded]
    num_prompt = sum(record.num_prompt_tokens or 0 for record in good)
    num_output = sum(record.num_output_tokens for record in good)
    num_chunks = sum(len(record.chunk_times) for record in good)
    met = sum(meets(record, limits_ms) for record in ended) if limits_ms else 0
    span = max(seconds, 1e-9)
    return Summary(
        seconds=seconds,
        num_requests=len(records),
        num_succeeded=len(good),
        num_failed=len(ended) - len(good),
        num_unfinished=len(records) - len(ended),
        errors=dict(Counter(record.error_kind for record in ended if record.error_kind is not None).most_common()),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        cached_share=_cached_share(good),
        tokens_per_chunk=num_output / num_chunks if num_chunks else None,
        peak_concurrency=peak_concurrency(
            (one.started, seconds if one.ended is None else one.ended) for one in records
        ),
        max_lateness_ms=1e3 * max((record.started - record.scheduled for record in ended), default=0.0),
        requests_per_second=len(good) / span,
        output_tokens_per_second=num_output / span,
        total_tokens_per_second=(num_prompt + num_output) / span,
        ttft_ms=distribution(record.ttft for record in good),
        tpot_ms=distribution(record.tpot for record in good),
        itl_ms=distribution(pause for record in good for pause in record.itl),
        e2e_ms=distribution(record.e2e for record in good),
        goodput=Goodput(met / len(ended) if ended else 0.0, met / span) if limits_ms else None,
    )


def _cached_share(records: Sequence[RequestRecord]) -> float | None:
    known = [record for record in records if record.num_cached_tokens is not None and record.num_prompt_tokens]
    num_prompt = sum(record.num_prompt_tokens or 0 for record in known)
    return sum(record.num_cached_tokens or 0 for record in known) / num_prompt if num_prompt else None
