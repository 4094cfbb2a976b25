"""The simulated service: small sizes, with the real schedulers and the real balancer."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY / "bench")
    return importlib.import_module("scale_simulation")


@pytest.mark.slow
def test_the_balancer_finds_more_of_the_prompts_than_taking_turns_does(
    simulation: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    options = ["--replicas", "6", "--sessions", "120", "--agents", "0.1", "--prefixes", "50", "--json", str(out)]
    turns, loads, balanced, by_events = simulation.main(options)
    for one in (balanced, by_events):
        assert turns.num_requests == loads.num_requests == one.num_requests, "the traffic is the same"
        assert len(turns.replicas_by_agent) == len(one.replicas_by_agent) > 0, "all agents have ended"
    for other in (turns, loads):
        assert balanced.hit_rate > other.hit_rate + 0.2
        assert by_events.hit_rate > other.hit_rate + 0.1, "of whole blocks, which are long here"
    rows = json.loads(out.read_text())["rows"]
    assert rows["balancer"]["replicas_by_agent"] < 3 < rows["round robin"]["replicas_by_agent"]
    assert rows["balancer"]["agent_first_token_p99"] < rows["round robin"]["agent_first_token_p99"]
    assert "120 sessions" in capsys.readouterr().out


@pytest.mark.parametrize("choice", ["balancer", "balancer, by events"])
def test_all_requests_end_and_replicas_are_empty_afterwards(simulation: Any, choice: str) -> None:
    traffic = simulation.Traffic(60, 10.0, agent_share=0.2, agent_turns=5)
    service = simulation.Service(traffic, 3, 64, choice, 1)  # small pools: sequences are preempted and evicted
    result = service.run()
    assert not service._running
    assert result.num_requests > 60
    for replica in service.replicas:
        replica.scheduler.check()
        assert not replica.scheduler.has_unfinished_requests()
    assert [(load.num_requests, load.num_tokens) for load in service._choice.loads] == [(0, 0)] * 3
