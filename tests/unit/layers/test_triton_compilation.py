"""Kernels are compiled by other processes, and this one finds them in Triton's cache. For a GPU that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")

# In a process of its own: here kernels may be those of Triton's interpreter, which has nothing to compile.
PROGRAM = """
import json, os
from contextlib import suppress
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver
from ratoon.layers.triton.compilation import AbsentDevice, ForkedCompiler, compile_launches, launches_go_to
from ratoon.layers.triton.launch import launch

@triton.jit
def double(x, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(x + places, 2 * tl.load(x + places))

@triton.jit
def broken(x, BLOCK: tl.constexpr):
    tl.store(x, no_such_name)

def first():
    for _ in range(2):  # the second one is the same kernel
        launch(double, (1,), torch.empty(64, device="meta"), BLOCK=64)

def second():
    launch(double, (1,), torch.empty(64, device="meta"), BLOCK=32)

compiled, loaded = [], []
knobs.compilation.listener = lambda *, src, cache_hit, **details: compiled.append(cache_hit)
driver.set_active(AbsentDevice(90))
forked = ForkedCompiler([first, second], 90, 2)
number = compile_launches(first, 4, lambda kernel: loaded.append(kernel.name), forked)
forked.wait_for("what is never compiled")  # until the first stage has ended
with suppress(ChildProcessError):  # it was waited for
    os.waitpid(forked._pid, 0)
compile_launches(second, 4, lambda kernel: loaded.append(kernel.name), forked)

def fail():
    launch(broken, (1,), torch.empty(64, device="meta"), BLOCK=64)

failing = ForkedCompiler([fail], 90, 2)
try:
    compile_launches(fail, 4, loaded.append, failing)
    error = None
except Exception as caught:
    error = type(caught).__name__
print(json.dumps([number, compiled, loaded, error]))
"""


def test_kernels_are_compiled_once_by_other_processes_and_an_error_is_that_of_the_kernel(tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # Triton reads the source of kernels from their file
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    number, found_in_cache, loaded, error = json.loads(done.stdout)
    assert number == 1
    assert found_in_cache == [True, True]
    assert loaded == ["double", "double"]
    assert error == "CompilationError"
