"""Profiles of a worker's steps: timings of functions as data, or a trace that torch writes."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ratoon.execution.step_profile import StepProfile


def work_of_a_step() -> float:
    return float(torch.ones(4).sum())


def test_functions_are_timed_with_their_callers() -> None:
    profile = StepProfile()
    profile.start(of_kernels=False)
    work_of_a_step()
    timings = profile.stop("/nowhere/it/is/not/written").functions
    (times,) = [times for (_, _, name), times in timings.items() if name == "work_of_a_step"]
    assert times[:2] == (1, 1)
    assert profile.stop("/nowhere").functions == {}, "it has ended"


def test_a_trace_of_operations_is_written_to_the_file(tmp_path: Path) -> None:
    profile, path = StepProfile(), tmp_path / "trace.json"
    profile.start(of_kernels=True)
    work_of_a_step()
    assert profile.stop(str(path)).functions == {}
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert "aten::sum" in names
