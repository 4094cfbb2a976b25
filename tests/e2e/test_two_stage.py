"""`ratoon bench two-stage` with real engines over tiny models: ways find the same beams, and compute what they say."""

from __future__ import annotations

import json

import pytest

from ratoon.cli import main
from tests.golden.engines import model_folder

SIZES = ["--prompt-tokens", "37", "--stage1-tokens", "9", "--beam-width", "4", "--beam-tokens", "3", "--rounds", "1"]
ENGINE = ["--threads", "1", "--device", "cpu"]


@pytest.mark.parametrize("family", ["llama with grouped heads", "qwen2 with windows by layer type"])
@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.one_in(3)
def test_ways_differ_in_what_they_compute_and_not_in_what_they_find(family, requests, tmp_path, capsys):
    file = tmp_path / "out.json"
    more = ["--requests", str(requests), "--json", str(file)]
    assert main(["bench", "two-stage", str(model_folder(family)), *SIZES, *ENGINE, *more]) == 0
    shown = capsys.readouterr()
    assert "same beams" in shown.out and "note:" not in shown.err
    result = json.loads(file.read_text())
    for way in result["ways"].values():
        assert way["runner_agrees"] is True
        assert (way["evaluation"]["same_answers"], way["evaluation"]["same_beams"]) == (1.0, 1.0)
    expected = {  # 51 tokens; of the first 46, all but the last are there, the prefix cache knows two whole blocks
        "no_reuse": (51, ["recomputed"]),
        "prefix_cache": (19, ["prefix_cache"]),
        "continuation": (6, ["lease"]),
        "prefix_cache_under_pressure": (51, ["recomputed"]),  # nothing of it survives
        "continuation_under_pressure": (6, ["lease"]),
    }
    found = {key: (way["computed_tokens"] / requests, way["sources"]) for key, way in result["ways"].items()}
    assert found == expected
    (turns,) = result["rounds"]
    for turn in turns.values():
        assert [len(trip["beams"]) for trip in turn["conversations"]] == [4] * requests


def test_a_kv_cache_too_small_for_leases_is_noted(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.svg"
    options = ["--lease-fraction", "0.05", "--num-blocks", "40", "--rounds", "2", "--plot", str(picture)]
    assert main(["bench", "two-stage", str(model_folder("llama with grouped heads")), *SIZES, *ENGINE, *options]) == 0
    assert "--lease-fraction" in capsys.readouterr().err
    assert "</svg>" in picture.read_text()
