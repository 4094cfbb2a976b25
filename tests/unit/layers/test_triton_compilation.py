"""Kernels are compiled by other processes, and this one finds them in Triton's cache. For a GPU that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# In a process of its own: here kernels may be those of Triton's interpreter, which has nothing to compile.
KERNELS = """
import sys
import torch
import torch.nn.functional as functional
import triton
import triton.language as tl

FACTOR = tl.constexpr(2)
OptionalTensor = torch.Tensor | None
DTYPES = {torch.bfloat16: 2}
assert hasattr(torch, "__version__") != ("ratoon.layers.triton.compile_server" in sys.modules)

@torch.no_grad()
def host_function(x: OptionalTensor):
    return functional.silu(x)

@triton.jit
def times(x):
    return x * FACTOR

@triton.jit
def double(x, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(x + places, times(tl.load(x + places)))

@triton.jit
def quadruple(x, BLOCK: tl.constexpr):
    tl.store(x, times(times(tl.load(x))))

@triton.jit
def broken(x, BLOCK: tl.constexpr):
    tl.store(x, no_such_name)
"""
PROGRAM = """
import json, threading
import torch
from triton import knobs
from triton.runtime import driver
from ratoon.layers.triton.compilation import compile_launches, is_marked, mark_of, send_launches
from ratoon.layers.triton.kernel_requests import AbsentDevice
from ratoon.layers.triton.compiler_process import CompilerProcess, Finish, Modules
from ratoon.layers.triton.launch import launch
import kernels

def start(kernel, block):
    launch(kernel, (1,), torch.empty(64, device="meta"), BLOCK=block)

def first():
    for _ in range(2):  # the second one is the same kernel
        start(kernels.double, 64)

def second():
    start(kernels.quadruple, 1)
    start(kernels.double, 32)

compiled, loaded = [], []
knobs.compilation.listener = lambda *, src, cache_hit, **details: compiled.append(cache_hit)
driver.set_active(AbsentDevice(90))
process = CompilerProcess(2)
process.send(Modules(("no_such_module", "kernels")))
later = threading.Thread(target=send_launches, args=(second, process))
def go_on(keys):
    global mark
    mark = mark_of(keys)
    assert not is_marked(mark)
    later.start()

number = compile_launches(first, 2, lambda kernel: loaded.append(kernel.name), process, go_on)
later.join()
process.send(Finish(mark))
process._process.wait()
assert is_marked(mark)
compile_launches(second, 2, lambda kernel: loaded.append(kernel.name))

failing = CompilerProcess(2)
try:
    compile_launches(lambda: start(kernels.broken, 64), 2, loaded.append, failing)
    error = None
except Exception as caught:
    error = type(caught).__name__
failing.close()
print(json.dumps([number, compiled, loaded, error]))
"""


@pytest.mark.slow
def test_kernels_are_compiled_once_by_other_processes_and_an_error_is_that_of_the_kernel(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "kernels.py").write_text(KERNELS)  # Triton reads their source, and the other process imports them
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
    assert found_in_cache == [True, True, True]
    assert sorted(loaded) == ["double", "double", "quadruple"]  # in the order in which processes end
    assert error == "CompilationError"


STAND_IN = """
import importlib, sys
from ratoon.execution.passes.cuda_driver import KERNEL_MODULES
from ratoon.layers.triton.compile_server import StandIn, StandInFinder

sys.meta_path.insert(0, StandInFinder())
for name in KERNEL_MODULES:
    importlib.import_module(name)
assert type(sys.modules["torch"]) is StandIn
"""


def test_modules_of_kernels_need_no_torch_to_be_imported() -> None:
    done = subprocess.run([sys.executable, "-c", STAND_IN], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


KEYS = """
import importlib, sys
from ratoon.layers.triton.kernel_requests import settle_key

def key_of(names):
    sys.modules.pop("kernels", None)
    kernels = importlib.import_module("kernels")
    for name in names:
        settle_key(getattr(kernels, name))
        key = getattr(kernels, name).cache_key
    return key

assert key_of(["double"]) == key_of(["quadruple", "double"])
"""


@pytest.mark.slow
def test_the_name_of_a_kernel_does_not_depend_on_those_that_were_launched_before(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "program.py").write_text(KEYS)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
