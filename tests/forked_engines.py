"""Engine and worker processes that are forked from a process in which torch is loaded already: a start takes 50 ms
instead of 2 s.

`forked_engines` replaces `Popen` where these processes are started; what runs in them is the same. Tests of the start
itself (tests/e2e) do without it.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from typing import Any

import pytest

from ratoon.core import processes

# What an engine process imports; and pytest, because a child loads the parent's main module again.
PRELOADED = [
    "torch",
    "ratoon.engine.processes.core_process",
    "ratoon.distributed.worker_process",
    "ratoon.execution.worker",
    "ratoon.models.source",
    "pytest",
]


class ForkedProcess:
    """The part of Popen that the parent of such a process uses."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: int, pass_fds: Sequence[int], env: dict[str, str]
    ) -> None:
        _, path_option, module_option, module, *arguments = command
        assert (path_option, module_option, stdin) == ("-P", "-m", subprocess.PIPE)
        assert arguments == [str(descriptor) for descriptor in pass_fds]
        lifeline, lifeline_of_parent = os.pipe()
        shown = sys.__stderr__.fileno() if stdout == subprocess.DEVNULL else stdout
        try:
            files = [DupFd(descriptor) for descriptor in (lifeline, shown, *pass_fds)]
            self._process = multiprocessing.get_context("forkserver").Process(
                target=_run_module, args=(module, env, files), daemon=True
            )
            self._process.start()
        except BaseException:
            os.close(lifeline_of_parent)
            raise
        finally:
            os.close(lifeline)
        self.pid = self._process.pid
        self.stdin = os.fdopen(lifeline_of_parent, "wb")

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("engine", timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()


def _run_module(module: str, environment: dict[str, str], files: list[Any]) -> None:
    """In the child: standard input and output, environment and arguments as Popen would have set them."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have workers
    processes.Popen = ForkedProcess  # type: ignore[misc, assignment]  # which are forked from the same process
    lifeline, shown, *others = (file.detach() for file in files)
    os.dup2(lifeline, 0)
    os.dup2(shown, 1)
    os.close(lifeline)
    os.close(shown)
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *(str(descriptor) for descriptor in others)]
    sys.exit(importlib.import_module(module).main())


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "Popen", ForkedProcess)
        yield
