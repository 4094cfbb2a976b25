"""torch's library is linked ahead of `import torch`, and only where that is of use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ratoon.engine.processes import torch_parts

LINKED_AHEAD = """
import sys
from ratoon.engine.processes.torch_parts import start_loading_torch_library
thread = start_loading_torch_library()
if thread is not None:
    thread.join()
    assert "libtorch_cpu" in open("/proc/self/maps").read()
assert "torch" not in sys.modules
import torch
assert torch.ones(3).sum() == 3
"""

# Opening a pipe waits for its other end, which only another thread of the process can open here.
LINKED_BESIDE = """
import os, pathlib, sys
from ratoon.engine.processes import torch_parts
path = pathlib.Path(sys.argv[1])
os.mkfifo(path)
torch_parts._library_path = lambda: path
thread = torch_parts.start_loading_torch_library()
path.write_bytes(b"not a library")
thread.join()
"""


@pytest.mark.slow  # a process that imports torch
@pytest.mark.skipif(sys.platform != "linux", reason="reads what a process has mapped from /proc")
def test_the_library_is_there_before_torch_is_imported_and_torch_works_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", LINKED_AHEAD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="there are no named pipes")
def test_python_runs_while_the_library_is_linked(tmp_path) -> None:
    command = [sys.executable, "-c", LINKED_BESIDE, str(tmp_path / "libtorch_cpu.so")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_nothing_is_loaded_where_torch_is_imported_already() -> None:
    import torch  # noqa: F401

    assert torch_parts.start_loading_torch_library() is None


def test_a_library_that_cannot_be_loaded_is_left_to_the_import(tmp_path, monkeypatch) -> None:
    damaged = tmp_path / "libtorch_cpu.so"
    damaged.write_bytes(b"not a library")
    monkeypatch.setattr(torch_parts, "_library_path", lambda: damaged)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    thread = torch_parts.start_loading_torch_library()
    assert thread is not None
    thread.join()
