"""Profiles of steps: where they are written, and that no other user can read them."""

from __future__ import annotations

import os
import pstats
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ratoon.core.errors import RequestError
from ratoon.distributed.uniproc import ThreadedExecutor
from ratoon.engine.utilities import VARIABLE, StepProfiler


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def executor() -> Iterator[Any]:
    made: Any = ThreadedExecutor()
    made.facts = SimpleNamespace(device="cpu")
    yield made
    made.close()


def record(profiler: StepProfiler) -> Path:
    profiler.start()
    sum(range(10))
    return Path(profiler.stop())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_profile_is_a_private_file_in_a_private_folder(monkeypatch, tmp_path, executor):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    profiler = StepProfiler(executor)
    first, second = record(profiler), record(profiler)
    assert first != second and first.parent == second.parent
    assert first.parent.parent == tmp_path
    assert mode(first.parent) == 0o700
    assert {mode(first), mode(second)} == {0o600}
    assert pstats.Stats(str(first)).total_calls > 0  # type: ignore[attr-defined]


def test_a_folder_that_is_named_is_made_private_and_one_that_exists_is_left_as_it_is(monkeypatch, tmp_path, executor):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new"))
    assert mode(record(StepProfiler(executor)).parent) == 0o700
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    monkeypatch.setenv(VARIABLE, str(shared))
    path = record(StepProfiler(executor))
    assert (path.parent, mode(shared), mode(path)) == (shared, 0o755, 0o600)


def test_a_link_in_the_place_of_a_profile_is_not_followed(monkeypatch, tmp_path, executor):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / f"ratoon-{os.getpid()}-1.prof").symlink_to(tmp_path / "target")
    profiler = StepProfiler(executor)
    with pytest.raises(RequestError, match="can't be written"):
        record(profiler)
    assert not (tmp_path / "target").exists()
    assert mode(record(profiler)) == 0o600


def test_a_folder_that_can_not_be_made_is_an_error_that_names_the_variable(monkeypatch, tmp_path, executor):
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "folder"))
    profiler = StepProfiler(executor)
    with pytest.raises(RequestError, match=VARIABLE):
        record(profiler)
    profiler.start()  # and can begin anew
    with pytest.raises(RequestError, match=VARIABLE):
        profiler.stop()


def test_what_runs_beside_the_planning_thread_is_in_the_profile(monkeypatch, tmp_path, executor):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    profiler = StepProfiler(executor)
    profiler.start()
    executor.run_on_thread(work_of_a_step)
    stats = pstats.Stats(profiler.stop()).stats  # type: ignore[attr-defined]
    assert "work_of_a_step" in {function for _, _, function in stats}


def work_of_a_step() -> int:
    return sum(range(10))
