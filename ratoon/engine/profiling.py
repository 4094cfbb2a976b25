"""Profiles of the engine's steps, started and stopped while it runs. On a GPU a trace of kernels, else of functions.

They reveal the engine's work, so only the user that runs it can read them.
"""

from __future__ import annotations

import cProfile
import itertools
import os
import pstats
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ratoon.core.errors import RequestError

if TYPE_CHECKING:
    from ratoon.distributed.executor import Executor

VARIABLE = "RATOON_PROFILE_DIR"
PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700


class FunctionProfile:
    """Function timings of the caller's thread, which plans steps, and of the one that carries them out."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._profiles = [cProfile.Profile()]

    def start(self) -> None:
        self._profiles[0].enable()
        steps = cProfile.Profile()
        try:
            self._executor.call(steps.enable)
            self._profiles.append(steps)
        except ValueError:  # from Python 3.12 on there is one profile for all threads
            pass

    def stop(self) -> None:
        for profile in self._profiles[1:]:
            self._executor.call(profile.disable)
        self._profiles[0].disable()

    def write(self, path: Path) -> None:
        pstats.Stats(*self._profiles).dump_stats(path)


class KernelTrace:
    """A trace of everything that the process has the GPU do."""

    def __init__(self) -> None:
        import torch

        self._profile = torch.profiler.profile(with_stack=True)

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()

    def write(self, path: Path) -> None:
        self._profile.export_chrome_trace(str(path))


class StepProfiler:
    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._on_gpu = executor.facts.device.startswith("cuda")
        self._active: FunctionProfile | KernelTrace | None = None
        self._numbers = itertools.count(1)
        self._folder: Path | None = None  # of our own, where the environment names none

    def start(self) -> None:
        if self._active is not None:
            raise RequestError("profile", "is under way", "stop it first")
        self._active = KernelTrace() if self._on_gpu else FunctionProfile(self._executor)
        self._active.start()

    def stop(self) -> str:
        """Ends the profile, and returns where it was written: a Chrome trace (.json) or function timings for pstats
        (.prof)."""
        if self._active is None:
            raise RequestError("profile", "is not under way", "start it first")
        profile, self._active = self._active, None
        profile.stop()
        path = self._make_file(".json" if self._on_gpu else ".prof")
        profile.write(path)
        path.chmod(PRIVATE_FILE)  # a writer may have put another file in its place
        return str(path)

    def _make_file(self, suffix: str) -> Path:
        """A new file that is private from the beginning. A link that lies in its place is not followed."""
        try:
            folder = self._find_folder()
            path = folder / f"ratoon-{os.getpid()}-{next(self._numbers)}{suffix}"
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE))
        except OSError as error:
            problem = f"can't be written: {error.strerror}"
            raise RequestError("profile", problem, f"a folder in {VARIABLE} that the server can write to") from None
        return path

    def _find_folder(self) -> Path:
        named = os.environ.get(VARIABLE)
        if named:
            folder = Path(named)
            folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            return folder
        if self._folder is None or not self._folder.exists():
            self._folder = Path(tempfile.mkdtemp(prefix="ratoon-profile-"))  # mkdtemp's mode is 0700
        return self._folder
