"""The client commands against the real server with the embedded model: both ends of the protocol are ours."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest

from ratoon.cli import main
from tests.e2e.test_cli import COMMAND, LIMIT, MODEL, ratoon
from tests.real_models import needs_embedded_model

pytestmark = [pytest.mark.slow, needs_embedded_model]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    environment = {
        name: value for name, value in os.environ.items() if name == "RATOON_DEVICE" or not name.startswith("RATOON_")
    }
    command = [*COMMAND, "serve", MODEL, "--port", "0", "--kv-memory", "128MiB"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, "the server did not say where it listens"
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT)


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in ("RATOON_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def bench(url: str, path, *options: str) -> dict:
    """The first round of `bench serve`, from its file."""
    small = ["--num-requests", "4", "--concurrency", "2", "--input-len", "24", "--output-len", "6", "--warmup", "0"]
    assert main(["bench", "serve", "--url", url, *small, *options, "--json", str(path)]) == 0
    return json.loads(path.read_text())["rounds"][0]


def test_complete_answers_as_generate_does_streamed_and_whole(url, capsys):
    prompt = ["The capital of France is", "--max-tokens", "8", "--temperature", "0"]
    for options in (["--no-stream"], ["--stream"]):
        assert main(["complete", "--url", url, *prompt, *options]) == 0
    answers = capsys.readouterr().out
    here = ratoon("generate", MODEL, *prompt, "--raw", "--kv-memory", "64MiB").stdout
    assert "Paris" in here
    assert answers == here * 2


def test_complete_searches_as_generate_does(url, capsys):
    search = ["The capital of France is", "--beam-width", "4", "-n", "2", "--max-tokens", "6"]
    assert main(["complete", "--url", url, *search]) == 0
    here = ratoon("generate", MODEL, *search, "--raw", "--kv-memory", "64MiB").stdout
    assert re.match(r"--- choice 0, score -0\.[89]", here) and here.count("Paris") == 2
    assert capsys.readouterr().out == here


def test_chat_uses_the_servers_cache(url):
    result = ratoon(
        "chat", "--url", url, "--max-tokens", "16", "--temperature", "0", "--system", "You know everything. " * 8,
        text="What is the capital of France?\nAnd of Italy?\n/stats\n",
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert "Paris" in result.stdout
    stats = re.search(r"prompt tokens  (\d+), of them from the cache (\d+)", result.stdout)
    assert stats and 0 < int(stats[2]) < int(stats[1])


def test_a_prompt_that_is_too_long_is_the_servers_to_refuse(url, capsys):
    assert main(["complete", "--url", url, "word " * 9000]) == 2
    assert "HTTP 400" in capsys.readouterr().err


def test_bench_measures_exact_lengths_token_by_token(url, tmp_path, capsys):
    found = bench(url, tmp_path / "out.json")
    assert capsys.readouterr().err == ""  # no note: the server takes all that was tried
    for request in found["requests"]:
        assert (request["num_prompt_tokens"], request["num_output_tokens"]) == (24, 6)
        assert sum(request["chunk_tokens"]) == 6 and request["finish_reason"] == "length"
    assert found["summary"]["cached_share"] == 0.0
    assert found["summary"]["ttft_ms"]["median"] <= found["summary"]["e2e_ms"]["median"]


def test_bench_sees_shared_prefixes_in_the_cache(url, tmp_path):
    shape = ["--dataset", "shared-prefix", "--prefix-len", "64", "--prefix-groups", "1", "--concurrency", "1"]
    requests = bench(url, tmp_path / "out.json", *shape)["requests"]
    assert [request["num_cached_tokens"] for request in requests] == [0, 64, 64, 64]


def test_bench_holds_conversations_whose_turns_find_the_ones_before(url, tmp_path):
    requests = bench(url, tmp_path / "out.json", "--dataset", "multi-turn", "--turns", "2")["requests"]
    later = [request for request in requests if request["turn"] == 1]
    assert len(later) == 2
    assert all(request["num_cached_tokens"] >= 24 for request in later)
