"""Executors: submit plans to workers, and return results. Here: one worker, in this process.

A submitted plan runs while the caller continues; the caller waits for its result when it needs it. A caller that has
nothing more urgent to do may lend its thread instead.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from threading import Condition, Lock
from typing import Any, Protocol, TypeVar

from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.core.errors import ConfigError, RequestError, StepSkippedError
from ratoon.core.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.stats import GraphStats
from ratoon.core.structured import StructuredOutput
from ratoon.execution.worker import Worker, WorkerFacts
from ratoon.layers.weights import TensorSource
from ratoon.observe.startup import StartupTimer

Result = TypeVar("Result")

IDLE_SECONDS = 0.2  # without work, after which a thread of steps begins what can be done in advance
MAX_SECONDS_BETWEEN_CALLS = 0.02  # for what a caller that has its results is kept waiting: two or three captures


class StepHandle(Protocol):
    """A step in flight: running, or queued behind earlier ones."""

    def start(self) -> None:
        """Launch it, if it was submitted to be launched on the caller's thread. Waits for no other thread. Raises
        nothing but interrupts: `result` does."""
        ...

    def launch(self) -> None:
        """Wait until it is launched. What the caller does next runs beside it, where a device executes it. Never
        raises: `result` does."""
        ...

    def result(self) -> ModelRunnerOutput:
        """Wait for its end. Raises what the step raised, or StepSkippedError; DeviceLostError if no further step can
        be executed in this process."""
        ...


class Executor(Protocol):
    """Executes plans in order."""

    facts: WorkerFacts
    # Whether to prepare later steps in moments without work. Only where no other code uses the device: a capture fails,
    # and so does what other threads wait for, if they synchronise with the device meanwhile.
    works_when_idle: bool

    @property
    def graph_stats(self) -> GraphStats | None:
        """What CUDA graphs cost. None: steps are not captured."""
        ...

    def submit(self, plan: SchedulerOutput, lends_thread: bool = False) -> StepHandle:
        """Queue a plan and return at once. A step after one that failed is not executed, because it depends on its
        results. Its handle raises StepSkippedError. `lends_thread`: no step is in flight, and the caller will call the
        handle's `start` at once: it may be launched on the caller's thread then."""
        ...

    def recover(self) -> None:
        """The caller has handled a failed step and the skipped ones: plans submitted from now on are executed."""

    def work_between_calls(self) -> None:
        """Prepares briefly for steps like those that it has seen; a caller that has its results, and waits, calls this.
        It does nothing where the executor works when it is idle."""

    def prepare(self, asked: StructuredOutput, owner: str | None = None) -> Future[Any]:
        """Compile the grammar, which was checked, of a request that will be in later plans. It raises RequestError if
        it can't be."""
        ...

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the thread of the steps, after those in flight."""
        ...

    def sleep(self, level: int) -> None:
        """Free the KV cache, and from level 2 on the weights. Nothing is executed until `wake_up`."""

    def wake_up(self) -> None: ...

    def shutdown(self) -> None: ...


ExecutorClass = Callable[[EngineConfig, ModelConfig, TensorSource, StartupTimer], Executor]


def executor_class(name: str) -> ExecutorClass:
    """The class that a config names: "uniproc", or "module:Class" for another one."""
    if name == "uniproc":
        return UniProcExecutor
    module_name, _, class_name = name.partition(":")
    try:
        found: ExecutorClass = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("executor", f"{name!r} can't be loaded ({error})", 'uniproc, or "module:Class"') from None
    return found


StepOutput = ModelRunnerOutput | AsyncModelRunnerOutput


class ThreadedExecutor:
    """Runs steps in order on one thread. A subclass implements the two phases of a step. With an output that is still
    pending on the device, the thread goes on to the next step, and the caller waits."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")
        self._failed = False  # a step failed; the others are skipped until `recover`
        self.works_when_idle = False
        self._turn = Lock()  # held by the thread that runs a step or a call
        self._queue_changed = Condition()
        self._num_queued = 0  # of steps and calls
        self._num_submitted = 0  # since the start
        self._rest_is_queued = False
        self._is_closed = False

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Launch the forward pass; may return before the device is done."""
        raise NotImplementedError

    def sample_tokens(self) -> StepOutput:
        raise NotImplementedError

    def examine_failure(self, error: Exception) -> None:
        """A step raised, or its results could not be read. Raises DeviceLostError if later ones would fail as well."""

    @property
    def graph_stats(self) -> GraphStats | None:
        return None

    @property
    def is_busy(self) -> bool:
        """Whether a device still executes steps that this thread has launched."""
        return False

    @property
    def has_idle_work(self) -> bool:
        return False

    def work_when_idle(self) -> bool:
        """A piece of work for a moment without steps. False: there is none. A step that is submitted meanwhile waits
        for the piece, not for more."""
        return False

    @property
    def has_work_of_steps(self) -> bool:
        """Whether there is idle work that steps so far have left."""
        return False

    def work_between_calls(self) -> None:
        if not self.works_when_idle and self.has_work_of_steps:
            self.call(self._work_briefly)

    def _work_briefly(self) -> None:
        end = time.monotonic() + MAX_SECONDS_BETWEEN_CALLS
        while self.has_work_of_steps and self.work_when_idle() and time.monotonic() < end:
            pass

    def on_lent_thread(self) -> AbstractContextManager[object] | None:
        """What a step needs around it on another thread than that of the steps. None: it can't run there."""
        return None

    def prepare(self, asked: StructuredOutput, owner: str | None = None) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_exception(RequestError("structured_output", "this executor has no grammars", "leave it out"))
        return done

    def submit(self, plan: SchedulerOutput, lends_thread: bool = False) -> StepHandle:
        surroundings = self.on_lent_thread() if lends_thread else None
        if surroundings is None:
            return StepInFlight(self, self._enqueue(self._run_step, plan))
        return InlineStep(self, plan, surroundings)

    def run_here(self, plan: SchedulerOutput, surroundings: AbstractContextManager[object]) -> Launched:
        """Waking the thread of the steps, on another core with cold caches, would take longer than most launches."""
        self._count_submitted()
        with self._turn, surroundings:
            try:
                return Launched(self._run_queued(self._run_step, plan))
            except Exception as error:
                return Launched(error)

    def _enqueue(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        self._count_submitted()
        return self._thread.submit(self._run_in_turn, function, *args)

    def _count_submitted(self) -> None:
        """Ends a rest."""
        with self._queue_changed:
            self._num_queued += 1
            self._num_submitted += 1
            self._queue_changed.notify()

    def _run_in_turn(self, function: Callable[..., Result], *args: Any) -> Result:
        with self._turn:
            return self._run_queued(function, *args)

    def _run_queued(self, function: Callable[..., Result], *args: Any) -> Result:
        with self._queue_changed:
            self._num_queued -= 1
        try:
            return function(*args)
        finally:
            with self._queue_changed:
                may_rest = self.works_when_idle and not (self._rest_is_queued or self._is_closed)
                if may_rest and self.has_idle_work:
                    self._rest_is_queued = True
                    self._thread.submit(self._rest)

    def _rest(self) -> None:
        """Prepares steps until there is work again, or nothing left to do in advance."""
        with self._queue_changed:
            self._rest_is_queued = False
            before = self._num_submitted

            def is_over() -> bool:
                return self._num_queued > 0 or self._num_submitted > before

            while True:
                if self._queue_changed.wait_for(is_over, IDLE_SECONDS):
                    return
                if not self.is_busy:
                    break
        while True:
            with self._turn:
                if is_over() or not self.work_when_idle():
                    return

    def _run_step(self, plan: SchedulerOutput) -> StepOutput:
        if self._failed:
            raise StepSkippedError(f"step {plan.step} was not executed: an earlier one failed")
        try:
            self.execute_model(plan)
            return self.sample_tokens()
        except BaseException as error:
            self.note_failure(error)
            raise

    def note_failure(self, error: BaseException) -> None:
        """The steps after this one are skipped until `recover`."""
        self._failed = True
        if isinstance(error, Exception):
            self.examine_failure(error)

    def recover(self) -> None:
        self._failed = False

    def call(self, function: Callable[[], Result]) -> Result:
        return self._enqueue(function).result()

    def shutdown(self) -> None:
        with self._queue_changed:
            self._is_closed = True
            self._num_queued += 1
            self._queue_changed.notify()
        self._thread.shutdown()


class Launched:
    """A future of what has been done on this thread."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: StepOutput | Exception) -> None:
        self._outcome = outcome

    def result(self) -> StepOutput:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class StepInFlight:
    """The handle of a step on the thread of a ThreadedExecutor."""

    def __init__(self, executor: ThreadedExecutor, launched: Future[StepOutput] | Launched) -> None:
        self._executor = executor
        self._launched = launched

    def start(self) -> None: ...

    def launch(self) -> None:
        if isinstance(self._launched, Future):
            wait([self._launched])

    def result(self) -> ModelRunnerOutput:
        output = self._launched.result()
        if isinstance(output, ModelRunnerOutput):
            return output
        try:
            return output.get_output()
        except Exception as error:  # a step after it may have been launched; its result is of no use either
            self._executor.note_failure(error)
            raise


class InlineStep:
    """The handle of a step that is launched by its caller."""

    def __init__(
        self, executor: ThreadedExecutor, plan: SchedulerOutput, surroundings: AbstractContextManager[object]
    ) -> None:
        self._executor = executor
        self._plan = plan
        self._surroundings = surroundings
        self._step: StepInFlight | None = None

    def start(self) -> None:
        if self._step is None:  # also where Ctrl-C broke into the launch: then the step is skipped
            launched = self._executor.run_here(self._plan, self._surroundings)
            self._step = StepInFlight(self._executor, launched)

    def launch(self) -> None:
        self.start()

    def result(self) -> ModelRunnerOutput:
        self.start()
        assert self._step is not None
        return self._step.result()


class UniProcExecutor(ThreadedExecutor):
    """One worker, in this process."""

    def __init__(self, config: EngineConfig, model: ModelConfig, tensors: TensorSource, timer: StartupTimer) -> None:
        super().__init__()
        self._worker = Worker(config, model, tensors, timer)
        self.call(self._worker.enter_thread)
        self.facts = self._worker.facts

    @property
    def num_computed_tokens(self) -> int:
        """Rows run through the model since the start, as counted by the runner."""
        return self._worker.runner.num_computed_tokens

    @property
    def graph_stats(self) -> GraphStats | None:
        graphs = self._worker.runner.graphs
        return None if graphs is None else graphs.stats

    @property
    def is_busy(self) -> bool:
        return self._worker.is_busy

    @property
    def has_idle_work(self) -> bool:
        return self._worker.has_idle_work

    @property
    def has_work_of_steps(self) -> bool:
        return self._worker.has_work_of_steps

    def work_when_idle(self) -> bool:
        return self._worker.work_when_idle()

    def on_lent_thread(self) -> AbstractContextManager[object] | None:
        return self._worker.on_lent_thread()

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._worker.execute_model(plan)

    def sample_tokens(self) -> StepOutput:
        return self._worker.sample_tokens()

    def examine_failure(self, error: Exception) -> None:
        self._worker.examine_failure(error)

    def prepare(self, asked: StructuredOutput, owner: str | None = None) -> Future[Any]:
        return self._worker.grammars.prepare(asked, owner)

    def sleep(self, level: int) -> None:
        self.call(lambda: self._worker.sleep(level))

    def wake_up(self) -> None:
        self.call(self._worker.wake_up)

    def shutdown(self) -> None:
        super().shutdown()
        self._worker.grammars.shutdown()
        del self._worker
