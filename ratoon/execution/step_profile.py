"""A profile of what the process of a worker does in its steps: of a GPU a trace of kernels, otherwise of functions.

It is started and stopped on the thread of the steps. Where profiles are kept, and who may read them, is the engine's.
"""

from __future__ import annotations

import cProfile
from contextlib import suppress
from typing import Any

from ratoon.core.worker import FunctionTimings


class StepProfile:
    def __init__(self) -> None:
        self._functions: cProfile.Profile | None = None
        self._kernels: Any = None  # torch's profile

    def start(self, of_kernels: bool) -> None:
        if of_kernels:
            import torch

            self._kernels = torch.profiler.profile(with_stack=True)
            self._kernels.start()
            return
        self._functions = cProfile.Profile()
        with suppress(ValueError):  # from Python 3.12 on there is one profile for all threads, which another has begun
            self._functions.enable()

    def stop(self, path: str) -> FunctionTimings:
        """Ends the profile. A trace of kernels is written to the file; timings of functions are returned."""
        kernels, self._kernels = self._kernels, None
        if kernels is not None:
            kernels.stop()
            kernels.export_chrome_trace(path)
        functions, self._functions = self._functions, None
        if functions is None:
            return FunctionTimings()
        functions.disable()
        functions.create_stats()
        timings: Any = functions
        return FunctionTimings(timings.stats)
