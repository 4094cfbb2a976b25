"""`make gpu-test`: which tests it runs, and in how many processes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[3] / "bench" / "gpu" / "run_checks.py"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("run_checks", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_checks", module)
    spec.loader.exec_module(module)
    return module


def test_all_tests_that_run_kernels_on_a_device_are_divided_among_processes(program: Any) -> None:
    (check,) = program.gpu_tests(4)
    assert " ".join(check.arguments).count(" -n 4 --dist worksteal ") == 1
    assert {"tests/cuda", "tests/golden/test_cuda.py"} <= set(check.arguments)
    assert any(name.endswith("attention/test_triton_backend.py") for name in check.arguments)
    (alone,) = program.gpu_tests(1)
    assert "-n" not in alone.arguments and alone.seconds > check.seconds


def test_there_are_no_more_processes_than_cores(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, has_xdist, expected in ((3, True, 3), (96, True, program.MAX_WORKERS), (96, False, 1)):
        monkeypatch.setattr(program.os, "sched_getaffinity", lambda pid, cores=cores: range(cores), raising=False)
        monkeypatch.setattr(program.importlib.util, "find_spec", lambda name, found=has_xdist: found or None)
        assert program.default_workers() == expected
