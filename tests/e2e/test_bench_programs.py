"""The benchmark programs still run: small sizes, which say nothing about speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.engines import model_folder

REPOSITORY = Path(__file__).parents[2]


def run_program(name: str, *options: str) -> str:
    command = [sys.executable, f"bench/{name}", "--no-wait", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_many_streams_all_get_their_own_answers(tmp_path: Path) -> None:
    sizes = ("--streams", "20", "--tokens", "8", "--slow-streams", "2", "--slow-tokens", "50", "--slow-seconds", "0.5")
    shown = run_program("many_streams.py", *sizes, "--profile", "--json", str(tmp_path / "out.json"))
    assert "Where the server's processor time goes" in shown
    phases = json.loads((tmp_path / "out.json").read_text())["phases"]
    assert [phase["streams"]["num_tokens"] for phase in phases.values()] == [20 * 8, 18 * 8, 18 * 8]


@pytest.mark.slow
def test_replicas_keep_conversations_together(tmp_path: Path) -> None:
    run_program("replicas.py", "--stub", "--sessions", "5", "--turns", "3", "--json", str(tmp_path / "out.json"))
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    one, balanced, turns = (results[name]["hit_rate"] for name in ("one engine", "2, balanced", "2, taking turns"))
    assert one >= balanced > turns


@pytest.mark.slow
def test_beams_are_measured_in_all_three_parts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("--quick", "--threads", "1", "--model", str(model_folder("llama with grouped heads")))
    files = ("--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"))
    shown = run_program("beams.py", *options, *files)
    assert "Beams that are also Ratoon's, transformers: 100.0%" in shown
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert list(parts) == ["latency", "search", "steps"]
    assert set(parts["search"]["ratios"]["cold"]) == {"transformers"}
    assert parts["steps"]["growth"]["with_prefix"].keys() == {"2", "4"}
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.slow
def test_hidden_states_are_measured_in_all_four_parts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("--quick", "--threads", "1", "--model", str(model_folder("llama with grouped heads")))
    files = ("--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"))
    shown = run_program("hidden_states.py", *options, "--before", str(REPOSITORY), *files)
    assert "the aim is at most 2" in shown
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert list(parts) == ["latency", "throughput", "prefill", "idle"]
    assert parts["latency"]["ratios"].keys() == {"in_steps", "saved", "transformers"}
    assert parts["throughput"]["ratios"].keys() == {"20", "100"}
    assert parts["prefill"]["ratios"].keys() == {"one_layer", "all_layers", "peer_one", "peer_all"}
    assert parts["idle"]["ratios"].keys() == {"step", "planning", "forward"}
    assert (tmp_path / "out.png").stat().st_size > 10_000
