"""`ratoon bench latency|throughput`, on an engine that plays a script: what is sent and what is printed."""

from __future__ import annotations

import json

import pytest

from ratoon.cli import main


@pytest.mark.parametrize(("kind", "count"), [("latency", "--batch"), ("throughput", "--num-requests")])
def test_bench_reports_speed_of_what_was_asked(client, capsys, kind, count):
    client.script = lambda request, choice: [1] * 64
    shape = ["--input-len", "10", "--output-len", "5", count, "3", "--repeat", "2", "--json"]
    assert main(["bench", kind, "fake", *shape]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["kind"], result["num_requests"], result["repeat"]) == (kind, 3, 2)
    assert result["output_tokens_per_second"]["min"] <= result["output_tokens_per_second"]["median"]
    measured = client.added[3:]  # the first round warms up
    assert len(measured) == 6
    assert all(len(request.prompt_token_ids) == 10 for request in measured)
    assert all(request.params.all_stop_token_ids == [] for request in measured)
    assert len({tuple(request.prompt_token_ids) for request in client.added}) == 9


def test_bench_prompts_are_the_same_in_every_run(client):
    client.script = lambda request, choice: [1] * 64
    for _ in range(2):
        main(["bench", "latency", "fake", "--input-len", "4", "--output-len", "2", "--repeat", "1"])
    half = len(client.added) // 2
    prompts = [request.prompt_token_ids for request in client.added]
    assert prompts[:half] == prompts[half:]
