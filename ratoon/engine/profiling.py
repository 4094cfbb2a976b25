"""Profiles of the engine's steps, started and stopped while it runs. On a GPU a trace of kernels, else of functions."""

from __future__ import annotations

import cProfile
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

from ratoon.core.errors import RequestError

VARIABLE = "RATOON_PROFILE_DIR"


class StepProfiler:
    """Profiles the thread that calls it: the one that runs the steps."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device.startswith("cuda")
        self._active: Any = None
        self._numbers = itertools.count(1)

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
        folder = Path(os.environ.get(VARIABLE) or tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        suffix = ".json" if self._on_gpu else ".prof"
        path = folder / f"ratoon-{os.getpid()}-{next(self._numbers)}{suffix}"
        if self._on_gpu:
            profile.stop()
            profile.export_chrome_trace(str(path))
        else:
            profile.disable()
            profile.dump_stats(path)
        return str(path)
