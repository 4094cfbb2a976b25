"""The interface of executors: they take plans and named calls, both data, to workers, and return results.

Workers may be a thread of this process, other processes or actors of a cluster: what is here says nothing about it, and
no function crosses it. The executor in the engine's own process is uniproc.py.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.core.errors import ConfigError
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.worker import WorkerFacts, WorkerStats, agree_on_choices, agree_on_pool
from ratoon.layers.weights import TensorSource
from ratoon.observe.startup import StartupTimer


class StepHandle(Protocol):
    """A step in flight: running, or queued behind earlier ones."""

    def launch(self) -> None:
        """Wait until it is launched. What the caller does next runs beside it, where a device executes it. Never
        raises: `result` does."""
        ...

    def result(self) -> ModelRunnerOutput:
        """Wait for its end. Raises what the step raised, or StepSkippedError; DeviceLostError if no further step can
        be executed by these workers."""
        ...


class Executor(Protocol):
    """Executes plans in order."""

    facts: WorkerFacts
    # Called from any thread when no step can be executed any more, with the reason, also while there is none
    when_failed: Callable[[str], None]

    @property
    def stats(self) -> WorkerStats:
        """The figures of the workers after the last step whose result was taken, or later ones."""
        ...

    def submit(self, plan: SchedulerOutput) -> StepHandle:
        """Queue a plan and return without waiting for the device. A step after one that failed is not executed, because
        it depends on its results: its handle raises StepSkippedError, until `recover` was called."""
        ...

    def collective_rpc(self, method: str, *arguments: Any) -> Future[list[Any]]:
        """Call a method of WORKER_METHODS (core/worker.py) on all workers: the results, in the order of ranks. A caller
        that no longer waits may cancel the future. Raises EngineError for a call that is not in the table."""
        ...

    def close(self) -> None:
        """End the workers, behind the steps in flight."""


ExecutorClass = Callable[[EngineConfig, ModelConfig, TensorSource, StartupTimer], Executor]


def executor_class(config: EngineConfig) -> ExecutorClass:
    """The class that a config names, by a name of ours or as "module:Class"."""
    name = config.executor
    if name == "auto":
        name = "uniproc" if config.num_ranks == 1 else "mp"
    if name == "uniproc" and config.num_ranks > 1:
        sizes = {size: getattr(config, size) for size in ("tensor_parallel_size", "pipeline_parallel_size")}
        problem = " and ".join(f"{size} is {count}" for size, count in sizes.items() if count > 1)
        raise ConfigError("executor", f"uniproc has one worker, and {problem}", "auto or mp")
    if name == "mp" and sys.platform != "linux":
        raise ConfigError("executor", f"mp needs Linux, and this is {sys.platform}", "uniproc")
    module_name, _, class_name = BUILT_IN.get(name, name).partition(":")
    try:
        found: ExecutorClass = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "executor", f"{name!r} can't be loaded ({error})", 'auto, uniproc, mp, ray, or "module:Class"'
        ) from None
    return found


BUILT_IN = {
    "uniproc": "ratoon.distributed.uniproc:UniProcExecutor",
    "mp": "ratoon.distributed.multiproc:MultiprocExecutor",
    "ray": "ratoon.distributed.ray_executor:RayExecutor",
}


def bring_up(call: Callable[..., list[Any]]) -> list[WorkerFacts]:
    """Brings the workers of one engine up, phase by phase, each phase on all of them: `call` is a collective call that
    waits. Nothing is allocated before they have agreed. Returns the facts of each."""
    agree_on_choices(call("choose"))
    call("load")
    pool = agree_on_pool(call("measure"))
    facts: list[WorkerFacts] = call("allocate", pool)
    call("warm_up")
    return facts
