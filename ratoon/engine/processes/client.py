"""The client of an engine core in the same process: direct calls. For other processes see mp_client.py."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ratoon.core.config import EngineConfig, FrontEndConfig, verify_engine_config
from ratoon.core.errors import ConfigError
from ratoon.core.health import EngineHealth, EngineState, Health
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequest
from ratoon.engine.build import build_core, calm_thread_pools, describe
from ratoon.engine.utilities import EngineUtilities
from ratoon.models.source import ModelSource
from ratoon.observe.startup import StartupTimer

if TYPE_CHECKING:
    from ratoon.engine.processes.mp_client import SyncMPClient
    from ratoon.engine.processes.sync_dp_client import SyncDPClient

PAUSE_WAIT = 0.05  # seconds until a caller of a paused engine has its turn again, to be interrupted for example


class InprocClient:
    """Runs the engine core in the caller's thread: `get_output` is one step."""

    def __init__(self, config: EngineConfig, source: ModelSource, timer: StartupTimer) -> None:
        calm_thread_pools()
        self.core = build_core(config, source, timer)
        self._utilities = EngineUtilities(self.core)

    def add_request(self, request: EngineCoreRequest) -> None:
        self.core.add_request(request)

    def together(self) -> AbstractContextManager[None]:
        """The caller begins the next step itself, so this step has every request that was handed over before."""
        return nullcontext()

    def abort_requests(self, request_ids: list[str]) -> None:
        self.core.abort_requests(request_ids)

    def stop_requests(self, stopped: dict[str, int | None]) -> None:
        self.core.stop_requests(stopped)

    def forget_roots(self, branch_ids: list[str]) -> None:
        self.core.forget_roots(branch_ids)

    def has_work(self) -> bool:
        return self.core.has_work()

    def get_output(self) -> EngineCoreOutputs:
        """One step. While the engine is paused it waits a moment for another thread to resume it, and brings no more
        than the ends of aborted requests."""
        self.core.wait_while_paused(PAUSE_WAIT)
        return self.core.step()

    def work_between_calls(self) -> None:
        self.core.work_between_calls()

    def call_utility(self, method: str, *arguments: Any) -> Any:
        return self._utilities.call(method, *arguments)

    def describe(self) -> dict[str, Any]:
        """Resolved settings and memory figures, for display."""
        return describe(self.core)

    def health(self) -> Health:
        """A core in this process is healthy while the process runs."""
        core = self.core
        return Health([EngineHealth(0, EngineState.OK, os.getpid(), paused=core.paused, asleep=core.asleep)])

    def shutdown(self) -> None:
        self.core.shutdown()


def make_client(
    config: EngineConfig, source: ModelSource, timer: StartupTimer, process: bool = False
) -> InprocClient | SyncMPClient:
    """Check the settings, then start an engine for them: in this process or in one of its own."""
    verify_engine_config(config)
    if not process:
        return InprocClient(config, source, timer)
    try:
        from ratoon.engine.processes.mp_client import SyncMPClient
    except ImportError as error:
        raise _missing("process", error) from None
    return SyncMPClient(config, timer)


def make_dp_client(config: EngineConfig, own: FrontEndConfig, timer: StartupTimer) -> SyncDPClient:
    """Check the settings, then start several engines for them, each in a process of its own."""
    try:
        from ratoon.engine.processes.sync_dp_client import SyncDPClient
    except ImportError as error:
        raise _missing("num_replicas", error) from None
    return SyncDPClient(config, own, timer)


def _missing(setting: str, error: ImportError) -> ConfigError:
    return ConfigError(setting, f"needs a package that is missing ({error.name})", "pip install 'ratoon[serve]'")
