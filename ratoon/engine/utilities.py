"""Calls to an engine core other than requests: by name, from this process or over the wire.

The names are the protocol: a name that is not in the table does not exist, whatever methods the core may have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ratoon.core.errors import RequestError
from ratoon.core.messages import UtilityCall, UtilityResult
from ratoon.engine.core import EngineCore
from ratoon.engine.processes.faults import fault_of
from ratoon.engine.profiling import StepProfiler


class EngineUtilities:
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._profiler = StepProfiler(core.executor)
        self._table: dict[str, Callable[..., Any]] = {
            "pause": core.pause,
            "resume": core.resume,
            "reset_prefix_cache": core.reset_prefix_cache,
            "stats": lambda: msgspec.to_builtins(core.stats()),
            "end_leases": core.end_leases,
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
