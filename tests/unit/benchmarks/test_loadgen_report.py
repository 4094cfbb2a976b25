"""The report: what people read, and what programs read."""

from __future__ import annotations

import json

import msgspec

from ratoon.benchmarks.loadgen.measures import RequestRecord, summarize
from ratoon.benchmarks.loadgen.report import as_object, format_report, format_warnings
from ratoon.benchmarks.loadgen.run import Round


def a_round(pause: float, late: float = 0.0, error_kind: str | None = None) -> Round:
    times = [0.1, 0.1 + pause, 0.1 + 2 * pause]
    records = [
        RequestRecord(
            session=index,
            turn=0,
            scheduled=0.0,
            started=late,
            ended=times[-1],
            chunk_times=times,
            chunk_tokens=[1, 1, 1],
            num_prompt_tokens=10,
            num_output_tokens=3,
            error_kind=error_kind if index else None,
        )
        for index in range(2)
    ]
    return Round(records, seconds=2.0)


def report(*rounds: Round, limits=None) -> str:
    return format_report([summarize(one.records, one.seconds, limits) for one in rounds], limits or {})


def line(text: str, label: str) -> str:
    return next(" ".join(line.split()) for line in text.splitlines() if line.startswith(label))


def test_one_round_shows_its_figures():
    text = report(a_round(0.05), limits={"ttft": 200.0})
    assert line(text, "requests") == "requests 2 of 2 answered in 2.00 s"
    assert line(text, "time to first token") == "time to first token 100.0 100.0 100.0 100.0 100.0"
    assert line(text, "time per output token") == "time per output token 50.00 50.00 50.00 50.00 50.00"
    assert line(text, "all tokens") == "all tokens 13.0 tok/s"
    assert line(text, "goodput") == "goodput 100.0 % of requests, 1.00 req/s within ttft 200 ms"
    assert "failed" not in text and "cached" not in text


def test_several_rounds_show_the_median_and_the_extremes():
    text = report(a_round(0.05), a_round(0.01), a_round(0.02))
    rows = [row.split() for row in text.splitlines()]
    position = next(index for index, row in enumerate(rows) if row[:3] == ["between", "chunks", "(ITL)"])
    assert rows[position][3:] == ["20.00"] * 5
    assert rows[position + 1] == ["10.00–50.00"] * 5


def test_errors_are_counted_by_kind():
    assert line(report(a_round(0.1, error_kind="HTTP 500")), "failed") == "failed HTTP 500: 1"
    assert "-" in line(report(Round([], 1.0)), "time to first token")


def test_a_generator_that_falls_behind_says_so():
    assert format_warnings([summarize(a_round(0.1, late=0.05).records, 1.0)], all_new=True) == []
    (warning,) = format_warnings([summarize(a_round(0.1, late=0.3).records, 1.0)], all_new=True)
    assert "300 ms late" in warning


def test_prompts_that_should_be_new_and_are_not_are_a_warning():
    one = a_round(0.1)
    one.records[0].num_cached_tokens = 9
    summaries = [summarize(one.records, 1.0)]
    (warning,) = format_warnings(summaries, all_new=True)
    assert "90%" in warning and "--seed" in warning
    assert format_warnings(summaries, all_new=False) == []


def test_the_object_holds_every_request_and_the_figures():
    one = a_round(0.05)
    text = msgspec.json.encode(as_object({"model": "m"}, [one], [summarize(one.records, one.seconds)]))
    facts = json.loads(text)
    assert facts["settings"] == {"model": "m"}
    (found,) = facts["rounds"]
    assert found["summary"]["ttft_ms"]["p99"] == 100.0
    assert [request["itl_ms"] for request in found["requests"]] == [[50.0, 50.0]] * 2
    assert found["requests"][1]["session"] == 1 and found["requests"][1]["num_output_tokens"] == 3
