"""The process that compiles kernels at start-up hangs, dies, or loses its parent: start-up goes on without it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratoon.execution.passes import cuda_driver
from ratoon.layers.triton import compiler_process
from ratoon.layers.triton.compiler_process import CompilerProcess, Request
from tests.waiting import PATIENCE, wait_until


def request(size: int = 0, constant: object = 1) -> Request:
    return Request("digest", "module", "name", 90, {"x": "*" * size}, {(0,): constant}, {}, {}, True)


def run_python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.fixture
def start() -> Iterator[Callable[[str], CompilerProcess]]:
    started: list[CompilerProcess] = []

    def start_program(program: str) -> CompilerProcess:
        started.append(CompilerProcess(2, run_python(program)))
        return started[-1]

    yield start_program
    for process in started:
        process.close()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_one_that_hangs_is_given_up_and_ended(
    start: Callable[[str], CompilerProcess], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler_process, "SECONDS_OF_SILENCE", 0.3)
    process = start("import time; time.sleep(1000)")
    for _ in range(40):  # more than a pipe holds, which it does not read
        process.send(request(size=10_000))
    with caplog.at_level(logging.WARNING):
        process.wait_for("digest")
        process.wait_for("another")  # at once
    assert caplog.text.count("gave no sign") == 1
    wait_until("it is ended", lambda: is_gone(process.pid))


def test_one_that_is_busy_is_waited_for(
    start: Callable[[str], CompilerProcess], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler_process, "SECONDS_OF_SILENCE", PATIENCE)
    sign = "print(flush=True); time.sleep(0.1); "
    process = start(f"import time; {sign * 10} print('digest', flush=True); time.sleep(1000)")
    process.send(request())
    process.wait_for("digest")
    assert not is_gone(process.pid)
    assert not caplog.text


@pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)", "print('nonsense ' * 9)"])
def test_one_that_dies_is_not_waited_for(
    start: Callable[[str], CompilerProcess], caplog: pytest.LogCaptureFixture, end: str
) -> None:
    with caplog.at_level(logging.WARNING):
        process = start(f"import os, signal, sys; {end}")
        process.send(request())
        process.wait_for("digest")
    assert "they are compiled by this one" in caplog.text


def test_a_constant_that_cannot_be_sent_is_not_waited_for(start: Callable[[str], CompilerProcess]) -> None:
    process = start("import time; time.sleep(1000)")
    process.send(request(constant=lambda: 0))
    process.wait_for("digest")


@pytest.mark.parametrize(("name", "value"), [("executable", "/no/such/python"), ("executable", ""), ("frozen", True)])
def test_kernels_are_compiled_here_if_there_can_be_no_other_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: object
) -> None:
    monkeypatch.setattr(cuda_driver, "usable_cores", lambda: cuda_driver.MIN_CORES)
    monkeypatch.setattr(sys, name, value, raising=False)
    with caplog.at_level(logging.WARNING):
        assert cuda_driver.take_compiler() is None
    assert "no other one can be started" in caplog.text


def test_one_that_was_not_needed_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "usable_cores", lambda: cuda_driver.MIN_CORES)
    cuda_driver.start_compiler()
    (process,) = cuda_driver._started
    cuda_driver.start_compiler()
    assert cuda_driver._started == [process]
    cuda_driver.end_compiler()
    wait_until("it is ended", lambda: is_gone(process.pid))
    monkeypatch.setattr(cuda_driver, "usable_cores", lambda: cuda_driver.MIN_CORES - 1)
    assert cuda_driver.take_compiler() is None


# ---- with the program itself ----

KERNELS = """
import os, sys, time
import triton
import triton.language as tl

@triton.jit
def double(x, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(x + places, 2 * tl.load(x + places))

if "ratoon.layers.triton.compile_server" in sys.modules:
    from ratoon.layers.triton import compile_server

    def compile(*args, **options):
        with open(FOLDER + "/children", "a") as file:
            print(os.getpid(), file=file)
        BAD_DAY

    compile_server.SECONDS_FOR_ONE = 1.0
    triton.compile = compile
"""
PROGRAM = """
import json, logging, sys
import torch
from triton import knobs
from triton.runtime import driver
from ratoon.layers.triton.compilation import compile_launches
from ratoon.layers.triton.kernel_requests import AbsentDevice
from ratoon.layers.triton.compiler_process import CompilerProcess
from ratoon.layers.triton.launch import launch
import kernels

logging.basicConfig(stream=sys.stderr)
hits = []
knobs.compilation.listener = lambda *, src, cache_hit, **details: hits.append(cache_hit)
driver.set_active(AbsentDevice(90))
process = CompilerProcess(2)
print(process.pid, flush=True)
def start():
    for block in (64, 32, 16):
        launch(kernels.double, (1,), torch.empty(64, device="meta"), BLOCK=block)

compile_launches(start, 2, lambda kernel: None, process)
process.close()
print(json.dumps(hits))
"""


def start_engine(folder: Path, bad_day: str, cache: Path) -> subprocess.Popen[str]:
    pytest.importorskip("triton")
    (folder / "kernels.py").write_text(KERNELS.replace("FOLDER", repr(str(folder))).replace("BAD_DAY", bad_day))
    (folder / "program.py").write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, str(folder / "program.py")],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def hits_of(engine: subprocess.Popen[str]) -> tuple[list[bool], str]:
    """Whether the kernel was found in the cache, and the log."""
    out, log = engine.communicate(timeout=300)
    assert engine.returncode == 0, log
    return json.loads(out.splitlines()[-1]), log


GOOD_DAY = "return triton.compiler.compile(*args, **options)"
BAD_DAYS = """
        block = list(args[0].constants.values())[0]
        if block == 64:
            os.kill(os.getpid(), 9)  # by the system, which is out of memory
        if block == 32:
            raise MemoryError
        time.sleep(1000)
"""


def test_a_kernel_whose_compilation_is_killed_fails_or_hangs_is_compiled_by_the_engine(tmp_path: Path) -> None:
    hits, _ = hits_of(start_engine(tmp_path, BAD_DAYS, tmp_path / "cache"))
    assert hits == [False] * 3
    assert len((tmp_path / "children").read_text().split()) == 3


def test_an_engine_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    engine = start_engine(tmp_path, "time.sleep(1000)", tmp_path / "cache")
    assert engine.stdout is not None
    pid = int(engine.stdout.readline())
    children = tmp_path / "children"
    wait_until("a kernel is being compiled", lambda: children.exists() and children.read_text().endswith("\n"))
    engine.send_signal(signal.SIGKILL)
    engine.communicate()
    wait_until("it is ended", lambda: is_gone(pid))
    wait_until("its child is ended", lambda: is_gone(int(children.read_text().split()[0])))


@pytest.mark.full
def test_kernels_are_compiled_where_the_cache_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    hits, log = hits_of(start_engine(tmp_path, "raise", tmp_path / "file" / "cache"))
    assert hits == [False] * 3
    assert "TRITON_CACHE_DIR" in log


@pytest.mark.full
def test_two_engines_may_start_with_one_cache(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    engines = [start_engine(folder, GOOD_DAY, tmp_path / "cache") for folder in folders]
    for engine in engines:
        hits, _ = hits_of(engine)
        assert len(hits) == 3
