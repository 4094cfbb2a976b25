"""The executor whose workers are processes, one for each rank, of this host and perhaps of others.

Plans and calls reach all workers in the same order: through a ring in shared memory (local_ranks.py), and on other
hosts through an encrypted connection (remote_ranks.py). A step's output is that of the first rank of the last stage:
all ranks of a stage choose the same tokens, from logits that all of them have. A worker that dies, fails in a step
which the others go through with, or does not end a step or a call within its time ends the executor: the engine is
started again, and its requests are replayed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol

import msgspec

from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.core.errors import ConfigError, DeviceLostError, EngineError, StepSkippedError
from ratoon.core.faults import error_of
from ratoon.core.outputs import ModelRunnerOutput, TransferReport
from ratoon.core.plan import SchedulerOutput
from ratoon.core.ranks import CallResult, FromWorker, StepResult, ToWorker, output_rank, ranks_of_node
from ratoon.core.wire import Buffer, Decoder
from ratoon.core.worker import WORKER_METHODS, WorkerFacts, WorkerStats, decode_result, encode_call
from ratoon.distributed.broadcast import RingTimeoutError
from ratoon.distributed.executor import bring_up
from ratoon.distributed.local_ranks import LocalRanks
from ratoon.distributed.plan_frames import encode_plan
from ratoon.layers.weights import TensorSource
from ratoon.observe.logging import get_logger
from ratoon.observe.startup import StartupTimer

logger = get_logger(__name__)

SECONDS_OF_A_STEP = 600.0  # as long as the client of an engine's process waits for one
SECONDS_TO_TAKE_A_PLAN = 60.0
SECONDS_TO_NOTICE_A_DEATH = 1.0
SECONDS_TO_ANSWER = 5.0  # after which a worker is said to answer nothing
SECONDS_BETWEEN_LOOKS = 1.0  # for what has taken too long


class RankGroup(Protocol):
    """The workers of this host, or those of all others."""

    @property
    def end(self) -> str | None:
        """Says how one of the workers has ended; None: all run."""
        ...

    def send(self, frames: list[Buffer], seconds: float) -> None:
        """Sends a message to all workers. Raises RingTimeoutError if one takes nothing for so long."""
        ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class StepInFlight:
    """The handle of a step."""

    def __init__(self, result: Future[StepResult]) -> None:
        self._result = result

    def launch(self) -> None:
        """Steps are launched by the workers, which nothing here waits for."""

    def result(self) -> ModelRunnerOutput:
        result = self._result.result()
        if result.fault is not None:
            problem = result.fault.problem
            raise StepSkippedError(problem) if result.was_skipped else error_of(result.fault)
        assert result.output is not None
        return result.output


class PendingStep:
    """A step that workers execute. Its result is that of one rank and, where blocks are fetched from a connector, also
    what the others tell: a block is there if the parts of all ranks are."""

    def __init__(self, telling: set[int], began: float) -> None:
        """`telling`: the ranks that have something to tell."""
        self.future: Future[StepResult] = Future()
        self.began = began
        self._telling = telling
        self._result: StepResult | None = None
        self._reports: list[TransferReport] = []

    def take(self, rank: int, result: StepResult, is_output: bool) -> bool:
        """A rank has told. True: all have, and `end` may be called."""
        self._telling.discard(rank)
        if is_output:
            self._result = result
        elif result.output is not None and result.output.transfers is not None:
            self._reports.append(result.output.transfers)
        return not self._telling or (is_output and result.fault is not None)

    def end(self) -> None:
        result = self._result
        assert result is not None
        if result.output is not None and result.output.transfers is not None and self._reports:
            join_reports(result.output.transfers, self._reports)
        self.future.set_result(result)


def join_reports(report: TransferReport, others: Sequence[TransferReport]) -> None:
    """Adds to the report of one rank what failed on others: a block with a part that is missing is missing."""
    report.failed_stores = sorted({*report.failed_stores, *(slot for other in others for slot in other.failed_stores)})
    report.failed_loads = sorted({*report.failed_loads, *(block for other in others for block in other.failed_loads)})
    report.loaded = [block for block in report.loaded if block not in report.failed_loads]
    report.fetch_seconds = max(report.fetch_seconds, *(other.fetch_seconds for other in others))


class PendingCall:
    """A call that workers are to answer."""

    def __init__(self, name: str, world_size: int, began: float) -> None:
        self.name = name
        self.began = began
        self.future: Future[list[Any]] = Future()
        self.results: dict[int, Any] = {}
        self.world_size = world_size

    @property
    def is_answered(self) -> bool:
        return len(self.results) == self.world_size

    @property
    def silent(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in range(self.world_size) if rank not in self.results]

    def end(self) -> None:
        """All workers have answered."""
        errors = [found for found in self.results.values() if isinstance(found, Exception)]
        if self.future.set_running_or_notify_cancel():
            if errors:
                self.future.set_exception(errors[0])
            else:
                self.future.set_result([self.results[each] for each in range(self.world_size)])


class MultiprocExecutor:
    """One process for each of `tensor_parallel_size` × `pipeline_parallel_size` ranks."""

    facts: WorkerFacts

    def __init__(self, config: EngineConfig, model: ModelConfig, tensors: TensorSource, timer: StartupTimer) -> None:
        self.when_failed: Callable[[str], None] = lambda problem: None
        verify_stages(config, model)
        self._world_size = config.num_ranks
        self._output_rank = output_rank(config)
        self._stats = WorkerStats()
        self._lock = threading.Lock()  # of what follows
        self._steps: dict[int, PendingStep] = {}
        self._calls: dict[int, PendingCall] = {}
        self._num_calls = 0
        self._failure: str | None = None
        # Counted by looks, not by a clock: they do not pass while this process is stopped
        self._seconds = 0.0
        self._last_result = 0.0  # when a step has ended
        self._closing = threading.Event()
        self._sending = threading.Lock()  # all hosts get messages in the same order
        self._groups: list[RankGroup] = []  # of this host, then of the others
        self._inboxes = {rank: Inbox(self, rank) for rank in range(self._world_size)}
        threading.Thread(target=self._watch_time, name="deadlines", daemon=True).start()
        try:
            self._start_workers(config, timer)
            with timer.phase("bring up workers"):
                if config.nnodes > 1:
                    self._call_and_wait("connect", self._call_and_wait("listen"))
                facts = bring_up(self._call_and_wait)
        except BaseException:
            self.close()
            raise
        self.facts = combine(facts)

    def _start_workers(self, config: EngineConfig, timer: StartupTimer) -> None:
        address, keys = "", None
        if config.nnodes > 1:
            from ratoon.distributed.remote_ranks import RemoteRanks

            remote = RemoteRanks(config, self, os.getpid())
            self._groups.append(remote)
            with timer.phase("wait for other hosts"):
                remote.wait_for_nodes()
            address, keys = remote.address, remote.keys
        local = LocalRanks(config, ranks_of_node(config, 0), self, os.getpid(), address, keys)
        self._groups.insert(0, local)
        self._workers = local.workers

    @property
    def stats(self) -> WorkerStats:
        """Returns the statistics of the rank whose results count. Rows of experts are returned once."""
        with self._lock:
            stats, self._stats = self._stats, msgspec.structs.replace(self._stats, experts={})
        return stats

    @property
    def world_size(self) -> int:
        return self._world_size

    # ---- the interface of executors ----

    def submit(self, plan: SchedulerOutput) -> StepInFlight:
        telling = set(range(self._world_size)) if plan.fetches else {self._output_rank}
        step = PendingStep(telling, self._seconds)
        with self._lock:
            self._raise_failure()
            self._steps[plan.step] = step
        self._broadcast([ToWorker.PLAN.value, *encode_plan(plan)])
        return StepInFlight(step.future)

    def collective_rpc(self, method: str, *arguments: Any) -> Future[list[Any]]:
        return self._call(method, *arguments).future

    def _call(self, method: str, *arguments: Any) -> PendingCall:
        frames = encode_call(method, arguments)
        with self._lock:
            self._raise_failure()
            self._num_calls += 1
            number = self._num_calls
            call = self._calls[number] = PendingCall(method, self._world_size, self._seconds)
        self._broadcast([ToWorker.CALL.value, number.to_bytes(8, "little"), *frames])
        return call

    def close(self) -> None:
        self._closing.set()
        with self._sending:
            for group in self._groups:
                with contextlib.suppress(EngineError):
                    group.send([ToWorker.CLOSE.value], 1.0)
        for group in self._groups:
            group.close()

    # ---- messages ----

    def _call_and_wait(self, method: str, *arguments: Any) -> list[Any]:
        return self.collective_rpc(method, *arguments).result()

    def _broadcast(self, frames: list[Buffer]) -> None:
        try:
            with self._sending:
                if self._closing.is_set():
                    raise DeviceLostError("the workers are being ended")
                for group in self._groups:
                    group.send(frames, SECONDS_TO_TAKE_A_PLAN)
        except RingTimeoutError as error:
            self.lost(str(error))
            raise DeviceLostError(str(error)) from None

    def take(self, rank: int, message: list[Buffer]) -> None:
        self._inboxes[rank].take(message)

    def take_step(self, rank: int, result: StepResult) -> None:
        """Takes the result of a step from a rank, on the thread that reads its messages."""
        is_output = rank == self._output_rank
        if result.fault is not None and not (is_output and (self._world_size == 1 or result.was_skipped)):
            # Behind the death of a rank the others fail as well, in the middle of a sum: the cause is what is told.
            problem = f"worker {rank} failed in step {result.step}: {result.fault.problem}"
            threading.Thread(target=self._lose_by_cause, args=(problem,), name="cause", daemon=True).start()
            return
        with self._lock:
            step = self._steps.get(result.step)
            has_ended = step is not None and step.take(rank, result, is_output)
            if has_ended:
                del self._steps[result.step]
                self._last_result = self._seconds
            if (stats := result.stats) is not None:
                # Steps end before the last one's figures are read.
                self._stats = msgspec.structs.replace(stats, experts=stats.experts or self._stats.experts)
        if step is not None and has_ended:
            step.end()

    def take_answer(self, rank: int, number: int, result: Any) -> None:
        with self._lock:
            call = self._calls.get(number)
            if call is None:
                return
            call.results[rank] = result
            if not call.is_answered:
                return
            del self._calls[number]
        call.end()  # without the lock: what waits for the call may make another one

    def name_of_call(self, number: int) -> str | None:
        with self._lock:
            call = self._calls.get(number)
            return None if call is None else call.name

    def lost(self, problem: str) -> None:
        """No step can be executed any more."""
        if self._closing.is_set():
            return
        with self._lock:
            if self._failure is not None:
                return
            self._failure = problem
            steps, self._steps = list(self._steps.values()), {}
            calls, self._calls = list(self._calls.values()), {}
        logger.error("%s", problem)
        for group in self._groups:  # first: the engine's process may end as soon as a step has failed
            group.kill()
        futures: list[Future[Any]] = [*(step.future for step in steps), *(call.future for call in calls)]
        for future in futures:
            with contextlib.suppress(InvalidStateError):  # cancelled
                future.set_exception(DeviceLostError(problem))
        self.when_failed(problem)

    # ---- what has taken too long, or failed ----

    def _watch_time(self) -> None:
        while not self._closing.wait(SECONDS_BETWEEN_LOOKS):
            self._seconds += SECONDS_BETWEEN_LOOKS
            problem = self._find_overdue()
            if problem is not None:
                self.lost(problem)
                return

    def _find_overdue(self) -> str | None:
        """Says which call has not been answered, or which step not ended, within its time."""
        with self._lock:
            now, last_result = self._seconds, self._last_result
            for call in self._calls.values():
                method = WORKER_METHODS[call.name]
                if now - (call.began if method.beside_steps else max(call.began, last_result)) > method.seconds:
                    return f"{name_workers(call.silent)} not answered {call.name!r} within {method.seconds:g} seconds"
            number, step = next(iter(self._steps.items()), (0, None))
        if step is None or now - max(step.began, last_result) <= SECONDS_OF_A_STEP:
            return None
        missed = f"not ended step {number} within {SECONDS_OF_A_STEP:g} seconds"
        silent = self._find_silent()
        if not silent:  # its result is awaited
            return f"{name_workers([self._output_rank])} {missed}"
        return f"{name_workers(silent)} {missed}, and not answered since"

    def _find_silent(self) -> list[int]:
        """The workers that do not even answer, for instance because they are stopped."""
        try:
            call = self._call("answer")
        except DeviceLostError:
            return []
        with contextlib.suppress(TimeoutError, DeviceLostError):
            call.future.result(SECONDS_TO_ANSWER)
        return call.silent

    def _lose_by_cause(self, problem: str) -> None:
        ended = self._wait_for_death()
        if ended is None and (silent := self._find_silent()):
            problem += f"; {name_workers(silent)} not answered for {SECONDS_TO_ANSWER:g} seconds"
        self.lost(ended or problem)

    def _wait_for_death(self) -> str | None:
        """Which worker has ended, if one does so soon."""
        deadline = time.monotonic() + SECONDS_TO_NOTICE_A_DEATH
        while True:
            ended = next((group.end for group in self._groups if group.end is not None), None)
            if ended is not None or time.monotonic() > deadline:
                return ended
            time.sleep(0.01)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise DeviceLostError(self._failure)


def name_workers(ranks: Sequence[int]) -> str:
    """The subject of a sentence."""
    if len(ranks) == 1:
        return f"worker {ranks[0]} has"
    return f"workers {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} have"


class Inbox:
    """Decodes the messages of one rank, on the thread that reads them."""

    def __init__(self, executor: MultiprocExecutor, rank: int) -> None:
        self._executor = executor
        self._rank = rank
        self._steps, self._answers = Decoder(StepResult), Decoder(CallResult)

    def take(self, message: list[Buffer]) -> None:
        kind, *frames = message
        if bytes(kind) == FromWorker.STEP.value:
            self._executor.take_step(self._rank, self._steps.decode(frames))
            return
        answer = self._answers.decode(frames)
        name = self._executor.name_of_call(answer.number)
        if name is not None:
            result = decode_result(name, frames[1:]) if answer.fault is None else error_of(answer.fault)
            self._executor.take_answer(self._rank, answer.number, result)


def verify_stages(config: EngineConfig, model: ModelConfig) -> None:
    if config.pipeline_parallel_size > model.num_layers:
        problem = f"{config.pipeline_parallel_size} stages can't be made of {model.num_layers} layers"
        raise ConfigError("pipeline_parallel_size", problem, f"at most {model.num_layers}")


def combine(facts: list[WorkerFacts]) -> WorkerFacts:
    """The facts of all ranks as those of one executor."""
    first = facts[0]
    return msgspec.structs.replace(
        first,
        weight_bytes=sum(one.weight_bytes for one in facts),
        kv_bytes=sum(one.kv_bytes for one in facts),
        num_threads=sum(one.num_threads for one in facts),
        rank_fingerprints=[one.kv_config.fingerprint for one in facts],
    )
