"""`ratoon bench two-stage --url` against a real server with a tiny model, and against what is no such server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from ratoon.cli import main
from tests.e2e.fake_server import fake_server
from tests.e2e.servers import Server, serving
from tests.unit.api.server.harness import MODEL, write_tiny_model

pytestmark = pytest.mark.slow

SIZES = ["--prompt-tokens", "37", "--stage1-tokens", "9", "--beam-width", "4", "--beam-tokens", "3", "--rounds", "1"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)) as running:
        yield running


def bench(server: Server, *options: str) -> int:
    return main(["bench", "two-stage", "--url", server.url, *options])


@pytest.mark.parametrize("load", [["--requests", "2"], ["--request-rate", "50"]], ids=["concurrency", "rate"])
@pytest.mark.one_in(2)
def test_ways_differ_in_what_they_compute_and_not_in_what_they_find(server, load, tmp_path, capsys):
    file = tmp_path / "out.json"
    assert bench(server, *SIZES, *load, "--num-conversations", "4", "--json", str(file)) == 0
    shown = capsys.readouterr()
    assert "same beams" in shown.out and "note:" not in shown.err
    result = json.loads(file.read_text())
    expected = {  # 51 tokens; of the first 46, all but the last are there, the prefix cache knows two whole blocks
        "no_reuse": (0, 4 * 51, ["recomputed"]),
        "prefix_cache": (4 * 32, 4 * 19, ["prefix_cache"]),
        "continuation": (4 * 45, 4 * 6, ["lease"]),
    }
    found = {key: (way["cached_tokens"], way["computed_tokens"], way["sources"]) for key, way in result["ways"].items()}
    assert found == expected
    assert all(way["evaluation"]["same_beams"] == 1.0 for way in result["ways"].values())


def test_a_file_with_text_and_conversations_and_references(server, tmp_path, capsys):
    file = tmp_path / "work.jsonl"
    lines = [
        {
            "prompt": "A text of more than a block.",
            "suffix": "!",
            "reference": "no such answer",
            "output_len": 5,
        },
        {"messages": [{"role": "user", "content": "Hello, how are you?"}], "suffix": "?", "reference": ["a", "b"]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.json"
    assert bench(server, *SIZES, "--file", str(file), "--json", str(out)) == 0
    assert "hits at 1" in capsys.readouterr().out
    ways = json.loads(out.read_text())["ways"]
    assert len({json.dumps(way["evaluation"]) for way in ways.values()}) == 1
    assert ways["continuation"]["sources"] == ["lease"]


def test_another_model_is_refused_by_name(server, capsys):
    assert bench(server, "--model", "nope") == 2
    assert f"'{MODEL}'" in capsys.readouterr().err


def test_what_the_server_can_not_do_is_said_before_anything_is_measured(server, capsys):
    assert bench(server, *SIZES, "--beam-width", "1000") == 2
    assert "no reuse, stage 2" in capsys.readouterr().err


def test_a_server_of_another_kind_is_refused(capsys):
    with fake_server() as (url, _):
        assert main(["bench", "two-stage", "--url", url]) == 2
    assert "not a Ratoon server" in capsys.readouterr().err
