"""Executors whose steps run on a thread of this process, and the one with a worker there.

A submitted plan runs while the caller continues; the caller waits for its result when it needs it. What a process
border would not let through is private to this file: functions on the thread of the steps, launches on the caller's
thread, and work for moments without steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from threading import Condition, Lock
from typing import Any, TypeVar

from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.core.errors import EngineError, RequestError, StepSkippedError
from ratoon.core.media import MediaInput
from ratoon.core.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.structured import StructuredOutput
from ratoon.core.worker import FunctionTimings, WorkerFacts, WorkerStats, find_method
from ratoon.distributed.executor import StepHandle, bring_up
from ratoon.execution.step_profile import StepProfile
from ratoon.execution.worker import Worker
from ratoon.layers.shard import WHOLE_MODEL, ModelPart, Stage
from ratoon.layers.weights import TensorSource
from ratoon.observe.startup import StartupTimer

Result = TypeVar("Result")

IDLE_SECONDS = 0.2  # without work, after which a thread of steps begins what can be done in advance,
IDLE_SECONDS_AT_START = 1.0  # and before the first step, which is likely to come soon
MAX_SECONDS_BETWEEN_CALLS = 0.02  # for what a caller that has its results is kept waiting: two or three captures
# Requests of a step up to which the caller's thread launches it, if no other is ahead of it. With more, planning the
# next one takes so long that it is done beside the launch.
MAX_REQUESTS_OF_LENT_THREAD = 8

StepOutput = ModelRunnerOutput | AsyncModelRunnerOutput


class ThreadedExecutor:
    """Runs steps in order on one thread. A subclass implements the two phases of a step, sets `facts`, and has those
    methods of WORKER_METHODS that it serves. With an output that is still pending on the device, the thread goes on to
    the next step, and the caller waits."""

    facts: WorkerFacts

    def __init__(self) -> None:
        self.when_failed: Callable[[str], None] = lambda problem: None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")
        self._failed = False  # a step failed; the others are skipped until `recover`
        self._works_when_idle = False
        self._turn = Lock()  # held by the thread that runs a step or a call
        self._queue_changed = Condition()
        self._num_queued = 0  # of steps and calls
        self._num_submitted = 0  # since the start
        self._num_in_flight = 0  # steps whose result was not taken
        self._has_stepped = False
        self._rest_is_queued = False
        self._is_closed = False
        self._profile = StepProfile()

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Launch the forward pass; may return before the device is done."""
        raise NotImplementedError

    def sample_tokens(self) -> StepOutput:
        raise NotImplementedError

    def examine_failure(self, error: Exception) -> None:
        """A step raised, or its results could not be read. Raises DeviceLostError if later ones would fail as well."""

    @property
    def stats(self) -> WorkerStats:
        return WorkerStats()

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

    def _work_briefly(self) -> None:
        end = time.monotonic() + MAX_SECONDS_BETWEEN_CALLS
        while self.has_work_of_steps and self.work_when_idle() and time.monotonic() < end:
            pass

    def on_lent_thread(self) -> AbstractContextManager[object] | None:
        """What a step needs around it on another thread than that of the steps. None: it can't run there."""
        return None

    # ---- the interface of executors ----

    def submit(self, plan: SchedulerOutput) -> StepHandle:
        surroundings = self.on_lent_thread() if self._may_lend(plan) else None
        self._num_in_flight += 1
        self._has_stepped = True
        if surroundings is None:
            return StepInFlight(self, self._enqueue(self._run_step, plan))
        return StepInFlight(self, self._run_here(plan, surroundings))

    def collective_rpc(self, method: str, *arguments: Any) -> Future[list[Any]]:
        if not find_method(method, len(arguments)).beside_steps:
            return self._enqueue(lambda: [self.run_method(method, arguments)])
        try:
            return as_list(self.run_method(method, arguments))
        except Exception as error:
            failed: Future[list[Any]] = Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        with self._queue_changed:
            self._is_closed = True
            self._num_queued += 1
            self._queue_changed.notify()
        self._thread.shutdown()

    # ---- methods of WORKER_METHODS ----

    def run_method(self, name: str, arguments: Sequence[Any]) -> Any:
        """Carry out a call of the table: its result, or a future of it if it is one that runs beside steps."""
        method = getattr(self, name, None)
        if method is None:  # a phase of a worker, which is over
            raise EngineError(f"this executor does not serve {name!r}")
        return method(*arguments)

    def prepare_grammar(self, asked: StructuredOutput, owner: str | None) -> Future[Any] | None:
        raise RequestError("structured_output", "this executor has no grammars", "leave it out")

    def encode_media(self, inputs: dict[str, MediaInput]) -> None: ...

    def fetch_media(self, places: dict[str, str]) -> Future[None] | None: ...

    def recover(self) -> None:
        self._failed = False

    def answer(self) -> None: ...

    def sleep(self, level: int) -> None: ...

    def wake_up(self) -> None: ...

    def allow_idle_work(self) -> None:
        self._works_when_idle = True

    def work_between_calls(self) -> Future[None] | None:
        if self._works_when_idle or not self.has_work_of_steps:
            return None
        return self._enqueue(self._work_briefly)

    def start_profile(self, of_kernels: bool) -> None:
        self._profile.start(of_kernels)

    def stop_profile(self, path: str) -> FunctionTimings:
        return self._profile.stop(path)

    # ---- the thread of the steps ----

    def _may_lend(self, plan: SchedulerOutput) -> bool:
        """Whether the caller's thread has nothing more urgent to do than to launch this step: the device has nothing
        to do until then."""
        num_requests = len(plan.num_scheduled_tokens) + len(plan.beam_steps) + len(plan.captures)
        return self._num_in_flight == 0 and num_requests <= MAX_REQUESTS_OF_LENT_THREAD

    def _run_here(self, plan: SchedulerOutput, surroundings: AbstractContextManager[object]) -> Launched:
        """Waking the thread of the steps, on another core with cold caches, would take longer than most launches."""
        self._count_submitted()
        try:
            with self._turn, surroundings:
                return Launched(self._run_queued(self._run_step, plan))
        except BaseException as error:  # also Ctrl-C, which `result` raises: the handle must not be lost
            return Launched(error)

    def run_on_thread(self, function: Callable[[], Result]) -> Result:
        """Run a function on the thread of the steps, after those in flight."""
        return self._enqueue(function).result()

    def note_result(self) -> None:
        """The result of a step was taken."""
        self._num_in_flight -= 1

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
                may_rest = self._works_when_idle and not (self._rest_is_queued or self._is_closed)
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
                if self._queue_changed.wait_for(is_over, IDLE_SECONDS if self._has_stepped else IDLE_SECONDS_AT_START):
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


def as_list(result: Any) -> Future[list[Any]]:
    """The result of the only worker as that of all. Of one that is still a future, which may hold what can't travel,
    the end alone is told; cancelling what is returned cancels it."""
    told: Future[list[Any]] = Future()
    if not isinstance(result, Future):
        told.set_result([result])
        return told

    def tell(done: Future[Any]) -> None:
        if not told.set_running_or_notify_cancel():
            return
        error = None if done.cancelled() else done.exception()
        if error is None:
            told.set_result([None])
        else:
            told.set_exception(error)

    result.add_done_callback(tell)
    told.add_done_callback(lambda told: result.cancel() if told.cancelled() else None)
    return told


class Launched:
    """A future of what has been done on this thread."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: StepOutput | BaseException) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        return True

    def result(self) -> StepOutput:
        outcome = self._outcome
        if not isinstance(outcome, BaseException):
            return outcome
        if not isinstance(outcome, Exception):  # an interrupt is raised once; the step stays one that has failed
            self._outcome = StepSkippedError(f"the step was interrupted by {type(outcome).__name__}")
        raise outcome


class StepInFlight:
    """The handle of a step."""

    def __init__(self, executor: ThreadedExecutor, launched: Future[StepOutput] | Launched) -> None:
        self._executor = executor
        self._launched = launched
        self._is_taken = False

    def launch(self) -> None:
        if isinstance(self._launched, Future):
            wait([self._launched])

    def result(self) -> ModelRunnerOutput:
        try:
            output = self._launched.result()
        finally:  # Ctrl-C may break into the wait
            if self._launched.done() and not self._is_taken:
                self._is_taken = True
                self._executor.note_result()
        if isinstance(output, ModelRunnerOutput):
            return output
        try:
            return output.get_output()
        except Exception as error:  # a step after it may have been launched; its result is of no use either
            self._executor.note_failure(error)
            raise


class WorkerThread(ThreadedExecutor):
    """A worker that has come up, in this process."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        self.run_on_thread(worker.enter_thread)

    @property
    def stats(self) -> WorkerStats:
        return self._worker.stats

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

    def prepare_grammar(self, asked: StructuredOutput, owner: str | None) -> Future[Any]:
        return self._worker.prepare_grammar(asked, owner)

    def encode_media(self, inputs: dict[str, MediaInput]) -> None:
        self._worker.encode_media(inputs)

    def fetch_media(self, places: dict[str, str]) -> Future[None] | None:
        return self._worker.fetch_media(places)

    def recover(self) -> None:
        self._worker.recover()
        super().recover()

    def sleep(self, level: int) -> None:
        self._worker.sleep(level)

    def wake_up(self) -> None:
        self._worker.wake_up()

    def close(self) -> None:
        super().close()
        self._worker.close()
        del self._worker


def _part_of(config: EngineConfig, model: ModelConfig) -> ModelPart:
    """The whole model. For an engine that only encodes: the encoder, and as few layers as a stage can have."""
    return ModelPart(stage=Stage(0, model.num_layers)) if config.encodes_only else WHOLE_MODEL


class UniProcExecutor(WorkerThread):
    """The only worker of an engine, in its process."""

    def __init__(self, config: EngineConfig, model: ModelConfig, tensors: TensorSource, timer: StartupTimer) -> None:
        worker = Worker(config, model, tensors, timer, _part_of(config, model))
        (self.facts,) = bring_up(lambda phase, *arguments: [getattr(worker, phase)(*arguments)])
        super().__init__(worker)
