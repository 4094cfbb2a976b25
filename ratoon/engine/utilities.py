"""Calls to an engine core other than requests: by name, from this process or over the wire.

The names are the protocol: a name that is not in the table does not exist, whatever methods the core may have.
One of them profiles the engine's steps: on a GPU a trace of kernels, else of functions. A profile reveals the engine's
work, so only the user that runs it can read it.
"""

from __future__ import annotations

import cProfile
import itertools
import os
import pstats
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ratoon.core.errors import RequestError
from ratoon.core.faults import fault_of
from ratoon.core.messages import UtilityCall, UtilityResult
from ratoon.core.private_folders import make_missing_folders
from ratoon.core.worker import FunctionTimings
from ratoon.engine.core import EngineCore

if TYPE_CHECKING:
    from ratoon.distributed.executor import Executor


class EngineUtilities:
    def __init__(self, core: EngineCore, index: int = 0) -> None:
        """`index`: the engine's among several."""
        self._core = core
        self._profiler = StepProfiler(core.executor)
        self._table: dict[str, Callable[..., Any]] = {
            "pause": core.pause,
            "resume": core.resume,
            "reset_prefix_cache": core.reset_prefix_cache,
            "stats": lambda: msgspec.to_builtins(core.stats()),
            "map": lambda watcher_id: core.map.report(watcher_id, index),
            "receive_blocks": self._receive_blocks,
            "tell_blocks": core.tell_blocks,
            "restore_leases": core.restore_leases,
            "end_leases": core.end_leases,
            "end_leases_of": core.end_leases_of,
            "sleep": core.sleep,
            "wake_up": core.wake_up,
            "start_profile": self._profiler.start,
            "stop_profile": self._profiler.stop,
            "check": self._check,
        }

    def call(self, name: str, *arguments: Any) -> Any:
        method = self._table.get(name)
        if method is None:
            raise RequestError("utility", f"{name!r} is unknown", ", ".join(self._table))
        return method(*arguments)

    def answer(self, call: UtilityCall) -> UtilityResult:
        """The call's result; an error is returned as a fault, and the engine continues."""
        try:
            return UtilityResult(call.call_id, self.call(call.method, *call.arguments))
        except Exception as error:
            return UtilityResult(call.call_id, fault=fault_of(error))

    def _receive_blocks(self, name: str, address: str) -> None:
        self._core.receive_blocks(name, address)

    def _check(self) -> dict[str, int]:
        """Check the block accounting: an error if it is inconsistent. The number of blocks, and of those in use."""
        scheduler = self._core.scheduler
        scheduler.check()
        num_usable = scheduler.kv_cache.num_usable_blocks
        return {
            "num_blocks": num_usable,
            "num_used_blocks": round(scheduler.kv_cache.usage * num_usable),
            "num_requests": len(scheduler.state.requests),
        }


VARIABLE = "RATOON_PROFILE_DIR"
PRIVATE_FILE = 0o600


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
            make_missing_folders(folder)
            return folder
        if self._folder is None or not self._folder.exists():
            self._folder = Path(tempfile.mkdtemp(prefix="ratoon-profile-"))  # mkdtemp's mode is 0700
        return self._folder
