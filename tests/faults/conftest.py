"""Faults need many engine processes, and are not about how one starts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.executors import HALT_FILE, Halt
from tests.faults.processes import PYTHONPATH
from tests.forked_engines import forked_engines


@pytest.fixture(scope="module", autouse=True)
def _forked_engines() -> Iterator[None]:
    with forked_engines():
        yield


@pytest.fixture
def halt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Halt:
    """For engines with a halting executor (executors.py)."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv(HALT_FILE, str(tmp_path / "halt"))
    return Halt(tmp_path / "halt")


@pytest.fixture
def own_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The parent of the directories of sockets, for this test alone: tests beside it start engines too. Its path is
    short, because addresses of sockets are."""
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)
