"""What `bench serve` is asked to do: resolved, or refused in one line before any server hears of it."""

from __future__ import annotations

import math

import pytest

from ratoon.api.cli import build_parser
from ratoon.benchmarks.loadgen.settings import LoadSettings, settings_of
from ratoon.cli import COMMANDS, main

URL = ["--url", "http://127.0.0.1:9"]


def settings(*options: str) -> LoadSettings:
    return settings_of(build_parser(COMMANDS).parse_args(["bench", "serve", *URL, *options]))


def test_without_options_a_hundred_random_requests_come_at_once():
    found = settings()
    assert (found.dataset, found.chat, found.shape.num_requests) == ("random", False, 100)
    assert math.isinf(found.request_rate) and found.concurrency is None
    assert found.ignore_eos and found.fields == {"temperature": 0.0}
    assert found.as_dict()["request_rate"] is None


def test_lengths_may_be_ranges_and_limits_are_in_milliseconds():
    found = settings("--input-len", "64-256", "--output-len", "5", "--goodput", "ttft:500", "e2el:1e4")
    assert (found.shape.input_len.low, found.shape.input_len.high, found.shape.output_len.high) == (64, 256, 5)
    assert found.limits_ms == {"ttft": 500.0, "e2e": 10000.0}


def test_further_fields_go_into_every_request_and_win():
    assert settings("--extra-body", '{"temperature": 1, "top_k": 3}').fields == {"temperature": 1, "top_k": 3}


def test_the_dataset_chooses_the_endpoint(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert settings("--dataset", "multi-turn").chat
    of_file = settings("--dataset", "jsonl", "--file", str(path))
    assert not of_file.chat and not of_file.ignore_eos and of_file.shape.num_requests == 2
    assert settings("--dataset", "jsonl", "--file", str(path), "--endpoint", "chat").chat
    assert len(settings("--dataset", "jsonl", "--file", str(path), "--num-requests", "1").file_sessions) == 1
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert settings("--dataset", "jsonl", "--file", str(path)).chat


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--num-requests", "0"], "--num-requests: 0"),
        (["--concurrency", "0"], "--concurrency"),
        (["--request-rate", "0"], "--request-rate"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--burstiness", "-1"], "--burstiness"),
        (["--think-time", "nan"], "--think-time"),
        (["--timeout", "0"], "--timeout"),
        (["--repeat", "0"], "--repeat"),
        (["--input-len", "many"], "--input-len"),
        (["--input-len", "9-3"], "--input-len"),
        (["--output-len", "0"], "--output-len"),
        (["--goodput", "speed:3"], "--goodput"),
        (["--goodput", "ttft:-3"], "--goodput"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--dataset", "jsonl"], "--file"),
        (["--file", "x"], "--file"),
        (["--dataset", "jsonl", "--file", "/nowhere/x"], "/nowhere/x"),
        (["--dataset", "multi-turn", "--endpoint", "completions"], "--endpoint"),
        (["--json", "/nowhere/x.json"], "--json"),
        (["--plot", "/"], "--plot"),
        (["--plot", "picture.xyz"], "--plot"),
        (["--url", "::"], "--url"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, options, part):
    assert main(["bench", "serve", *URL, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert part in captured.err


def test_a_file_with_fewer_requests_than_asked_for_is_refused(tmp_path, capsys):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "a"}\n')
    assert main(["bench", "serve", *URL, "--dataset", "jsonl", "--file", str(path), "--num-requests", "2"]) == 2
    assert "has 1" in capsys.readouterr().err
