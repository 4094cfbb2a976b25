"""Profiles of the engine's steps, started and stopped while it runs. On a GPU a trace of kernels, else of functions.

They tell what the engine works on: only the user that runs it can read them.
"""

from __future__ import annotations

import cProfile
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

from ratoon.core.errors import RequestError

VARIABLE = "RATOON_PROFILE_DIR"
PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700


class StepProfiler:
    """Profiles the thread that calls it: the one that runs the steps."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device.startswith("cuda")
        self._active: Any = None
        self._numbers = itertools.count(1)
        self._folder: Path | None = None  # of our own, where the environment names none

    def start(self) -> None:
        if self._active is not None:
            raise RequestError("profile", "is under way", "stop it first")
        if self._on_gpu:
            import torch

            self._active = torch.profiler.profile(with_stack=True)
            self._active.start()
        else:
            self._active = cProfile.Profile()
            self._active.enable()

    def stop(self) -> str:
        """Where the profile was written: a Chrome trace (.json) or function timings for pstats (.prof)."""
        if self._active is None:
            raise RequestError("profile", "is not under way", "start it first")
        profile, self._active = self._active, None
        if self._on_gpu:
            profile.stop()
        else:
            profile.disable()
        path = self._make_file(".json" if self._on_gpu else ".prof")
        if self._on_gpu:
            profile.export_chrome_trace(str(path))
        else:
            profile.dump_stats(path)
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
