"""Profiles of the engine's steps, started and stopped while it runs. On a GPU a trace of kernels, else of functions.

They reveal the engine's work, so only the user that runs it can read them.
"""

from __future__ import annotations

import cProfile
import itertools
import os
import pstats
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ratoon.core.errors import RequestError
from ratoon.core.worker import FunctionTimings

if TYPE_CHECKING:
    from ratoon.distributed.executor import Executor

VARIABLE = "RATOON_PROFILE_DIR"
PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700


class Timings:
    """Timings of functions in the form that pstats.Stats reads."""

    def __init__(self, timings: FunctionTimings) -> None:
        self.stats = timings.functions

    def create_stats(self) -> None: ...


def write_timings(profiles: Sequence[cProfile.Profile | Timings], path: Path) -> None:
    stats = pstats.Stats()
    for profile in profiles:
        profile.create_stats()
        if profile.stats:
            stats.add(profile)  # type: ignore[arg-type]
    stats.dump_stats(path)


class StepProfiler:
    """Profiles of this thread, which plans steps, and of the workers, which carry them out."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._of_kernels = executor.facts.device.startswith("cuda")
        self._planning: cProfile.Profile | None = None  # while a profile is under way
        self._numbers = itertools.count(1)
        self._folder: Path | None = None  # of our own, where the environment names none

    def start(self) -> None:
        if self._planning is not None:
            raise RequestError("profile", "is under way", "stop it first")
        self._executor.collective_rpc("start_profile", self._of_kernels).result()
        self._planning = cProfile.Profile()
        if not self._of_kernels:
            with suppress(ValueError):  # from Python 3.12 on there is one profile for all threads of a process
                self._planning.enable()

    def stop(self) -> str:
        """Ends the profile, and returns where it was written: a Chrome trace (.json) or function timings for pstats
        (.prof)."""
        if self._planning is None:
            raise RequestError("profile", "is not under way", "start it first")
        planning, self._planning = self._planning, None
        planning.disable()
        try:
            path = self._make_file(".json" if self._of_kernels else ".prof")
        except RequestError:
            self._executor.collective_rpc("stop_profile", os.devnull).result()
            raise
        timings = self._executor.collective_rpc("stop_profile", str(path)).result()
        if not self._of_kernels:
            write_timings([planning, *map(Timings, timings)], path)
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
