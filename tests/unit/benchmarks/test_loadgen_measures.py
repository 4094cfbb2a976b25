"""Percentiles, latencies, goodput: arithmetic that must be right to the last digit."""

from __future__ import annotations

import pytest

from ratoon.benchmarks.loadgen.measures import (
    RequestRecord,
    distribution,
    meets,
    peak_concurrency,
    summarize,
)


def record(started=0.0, times=(0.1, 0.2, 0.4), tokens=None, **fields) -> RequestRecord:
    tokens = list(tokens if tokens is not None else [1] * len(times))
    values = {"ended": times[-1] + 0.05 if times else started + 0.05, "num_output_tokens": sum(tokens), **fields}
    return RequestRecord(
        session=0, turn=0, scheduled=started, started=started, chunk_times=list(times), chunk_tokens=tokens, **values
    )


def test_a_distribution_is_in_milliseconds_and_ignores_what_is_missing():
    spread = distribution([0.001, None, 0.003])
    assert (spread.mean, spread.median, spread.min, spread.max) == pytest.approx((2, 2, 1, 3))
    assert spread.std == pytest.approx(1)
    assert (spread.p90, spread.p95, spread.p99) == pytest.approx((2.8, 2.9, 2.98)), "linear between the nearest"
    assert distribution([None]) is None


def test_latencies_of_a_request():
    one = record(started=0.05, times=(0.15, 0.25, 0.45))
    assert one.ttft == pytest.approx(0.1)
    assert one.tpot == pytest.approx(0.15)  # two tokens in 0.3 s
    assert one.itl == pytest.approx([0.1, 0.2])
    assert one.e2e == pytest.approx(0.45)


def test_tokens_of_one_chunk_count_each_and_those_of_the_first_took_no_time_behind_it():
    one = record(times=(0.1, 0.5), tokens=(2, 4))
    assert one.tpot == pytest.approx(0.1)
    assert one.itl == pytest.approx([0.4])


def test_an_answer_in_one_piece_has_no_time_per_token_and_an_empty_one_no_first():
    assert record(times=(0.1,), tokens=(5,)).tpot is None
    assert record(times=()).ttft is None


@pytest.mark.parametrize(
    ("intervals", "peak"),
    [([], 0), ([(0, 1), (1, 2)], 1), ([(0, 3), (1, 2), (1.5, 4)], 3), ([(0, 2), (0, 2), (2, 3)], 2)],
)
def test_peak_concurrency_counts_what_overlaps(intervals, peak):
    assert peak_concurrency(intervals) == peak


def test_goodput_needs_every_limit():
    one = record(times=(0.1, 0.2), ended=0.2)
    assert meets(one, {"ttft": 100.1, "tpot": 100.1, "e2e": 200.1})
    assert not meets(one, {"ttft": 99.0})
    assert not meets(one, {"ttft": 100.1, "tpot": 99.0})
    assert not meets(one, {"e2e": 199.0})
    assert meets(record(times=(0.1,)), {"tpot": 1.0})  # it has no such time
    assert not meets(record(error_kind="timeout"), {"ttft": 1e9})


def test_a_summary_counts_tokens_errors_and_what_was_cut_off():
    records = [
        record(num_prompt_tokens=10, num_cached_tokens=5),
        record(num_prompt_tokens=30, num_cached_tokens=15),
        record(error_kind="HTTP 500", error="no"),
        record(error_kind="HTTP 500", error="no"),
        record(error_kind="timeout", error="no"),
        record(ended=None),
    ]
    summary = summarize(records, seconds=2.0, limits_ms={"ttft": 1000.0})
    assert (summary.num_requests, summary.num_succeeded, summary.num_failed, summary.num_unfinished) == (6, 2, 3, 1)
    assert summary.errors == {"HTTP 500": 2, "timeout": 1}
    assert (summary.num_prompt_tokens, summary.num_output_tokens, summary.cached_share) == (40, 6, 0.5)
    assert (summary.requests_per_second, summary.output_tokens_per_second) == (1.0, 3.0)
    assert summary.total_tokens_per_second == 23.0
    assert summary.peak_concurrency == 6
    assert (summary.goodput.share, summary.goodput.rate) == (0.4, 1.0)


def test_a_server_that_says_nothing_of_its_cache_is_not_said_to_have_none():
    assert summarize([record(num_prompt_tokens=10)], 1.0).cached_share is None
    assert summarize([record(num_prompt_tokens=10, num_cached_tokens=0)], 1.0).cached_share == 0.0


def test_nothing_that_succeeded_still_makes_a_summary():
    summary = summarize([record(error_kind="timeout")], 1.0, {"ttft": 1.0})
    assert summary.ttft_ms is None and summary.goodput.share == 0.0
    assert summarize([], 0.0).num_requests == 0
