"""Engine, worker and server processes that are forked from a process in which all modules are loaded already: a start
takes 50 ms instead of 2 s.

`forked_engines` replaces `Popen` where engines and workers are started; what runs in them is the same. Tests of the
start itself (tests/e2e) do without it. `ForkedCommand` is `ratoon serve MODEL …` in such a process, whose engines and
front ends are forked in the same way.

    python -m tests.forked_engines ADDRESS FD serve MODEL …

is that command in a process that was started as users start it, without torch. Its engines and front ends are forked
from the process that listens at the address, which ends when all copies of the descriptor are closed.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.reduction import DupFd
from typing import Any
from unittest import mock

from ratoon.core import processes

# What an engine process imports; and pytest, because a child loads the parent's main module again.
PRELOADED = [
    "torch",
    "ratoon.engine.processes.core_process",
    "ratoon.distributed.worker_process",
    "ratoon.execution.worker",
    "ratoon.models.source",
    "ratoon.cli",
    "ratoon.api.server.front_end_process",
    "ratoon.engine.processes.moving_client",
    "pytest",
]


class Handed:
    """A descriptor that a child gets with its arguments. It is duplicated while they are encoded, so that it travels to
    the fork itself: otherwise this process would keep a copy until the child asks for it, and a child that is killed
    before would seem to live on, because its end of a pipe stays open here."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (DupFd(self._descriptor),)


def _same(handed: Any) -> Any:
    return handed


class Forked:
    """The part of Popen that the parent of such a process uses."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        self._process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()


class ForkedProcess(Forked):
    """An engine, a worker or a front end."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: int, pass_fds: Sequence[int], env: dict[str, str]
    ) -> None:
        _, path_option, module_option, module, *arguments = command
        assert (path_option, module_option, stdin) == ("-P", "-m", subprocess.PIPE)
        assert arguments == [str(descriptor) for descriptor in pass_fds]
        lifeline, lifeline_of_parent = os.pipe()
        errors = sys.__stderr__.fileno()
        shown = errors if stdout == subprocess.DEVNULL else stdout
        try:
            files = [Handed(descriptor) for descriptor in (lifeline, shown, errors, *pass_fds)]
            super().__init__(_run_module, module, env, files)
        except BaseException:
            os.close(lifeline_of_parent)
            raise
        finally:
            os.close(lifeline)
        self.stdin = os.fdopen(lifeline_of_parent, "wb")


class ForkedCommand(Forked):
    """`ratoon` with these arguments. Its standard output is read while it runs, and its errors at its end."""

    def __init__(self, *arguments: str, env: dict[str, str], text: str = "", has_forks: bool = True) -> None:
        _start_server()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        shown, shown_of_child = os.pipe()
        with tempfile.TemporaryFile("w+") as given, open(shown_of_child, "wb") as writing:
            given.write(text)
            given.seek(0)
            files = [Handed(file.fileno()) for file in (given, writing, self._errors)]
            super().__init__(_run_command, arguments, env, files, has_forks)
        self.stdout = open(shown)  # noqa: SIM115
        self._said: tuple[str, str] | None = None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        if self._said is None:
            with self.stdout, self._errors:
                output = self.stdout.read()
                self.wait(timeout)
                self._errors.seek(0)
                self._said = output, self._errors.read()
        return self._said


def run_forked(*arguments: str, env: dict[str, str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command as `subprocess.run` does."""
    command = ForkedCommand(*arguments, env=env, text=text)
    output, errors = command.communicate()
    return subprocess.CompletedProcess(["ratoon", *arguments], command.wait(), output, errors)


def _run_module(module: str, environment: dict[str, str], files: list[Any]) -> None:
    """In the child: standard files, environment and arguments as Popen would have set them."""
    _fork_from_the_same_process()
    others = _settle(environment, files)
    sys.argv = [module, *(str(descriptor) for descriptor in others)]
    sys.exit(importlib.import_module(module).main())


def _run_command(arguments: Sequence[str], environment: dict[str, str], files: list[Any], has_forks: bool) -> None:
    if has_forks:
        _fork_from_the_same_process()
    _settle(environment, files)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.argv = ["ratoon", *arguments]
    sys.exit(importlib.import_module("ratoon.cli").main())


def _settle(environment: dict[str, str], files: list[Any]) -> list[int]:
    """Returns the descriptors behind those of the standard files."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    descriptors = [file.detach() for file in files]
    for target, file in enumerate(descriptors[:3]):
        os.dup2(file, target)
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    return descriptors[3:]


def _fork_from_the_same_process() -> None:
    """This process has not started the one that forks: it would take it for lost, and start another, without torch."""
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[attr-defined]
    processes.Popen = ForkedProcess  # type: ignore[misc, assignment]


@functools.cache
def _start_server() -> None:
    """Once in a session, and before tests measure anything: its first process waits for all of the imports."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    first = multiprocessing.get_context("forkserver").Process(target=int)
    first.start()
    first.join()


@contextmanager
def forked_engines() -> Iterator[None]:
    _start_server()
    with mock.patch.object(processes, "Popen", ForkedProcess):
        yield


def command_with_forks(*arguments: str) -> tuple[list[str], int]:
    """Returns the command that runs `ratoon` with these arguments, and the descriptor that it must inherit."""
    _start_server()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    descriptor: int = server._forkserver_alive_fd
    command = [sys.executable, "-m", __name__, server._forkserver_address, str(descriptor), *arguments]
    return command, descriptor


def main() -> int:
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd = sys.argv[1], int(sys.argv[2])
    _fork_from_the_same_process()
    sys.argv[:3] = ["ratoon"]
    return importlib.import_module("ratoon.cli").main()


if __name__ == "__main__":
    sys.exit(importlib.import_module("tests.forked_engines").main())  # whose functions a child finds by their names
