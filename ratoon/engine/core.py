"""EngineCore: the loop of schedule, submit, wait, update. It knows tokens, not text.

Steps are objects in flight: the core plans up to `max_steps_in_flight` of them, hands each plan to the executor, and
takes results in the same order. With one, every step ends before the next is planned; with two, the next is planned
and results are handed on while the device works.

One thread runs it. Requests may be aborted from any thread: what arrives while a step runs takes effect before its
outputs go out.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from ratoon.core.config import EngineConfig
from ratoon.core.errors import DeviceLostError, RequestError
from ratoon.core.futures import all_done
from ratoon.core.kv_chain import open_connectors
from ratoon.core.kv_connector import BlockIndex, TransferIndex, open_index
from ratoon.core.kv_events import Event
from ratoon.core.kv_transfer import FIELD, KVTransfer, answer_of
from ratoon.core.params import SamplingParams
from ratoon.core.plan import NewRequestData, SchedulerOutput
from ratoon.core.prepared import prepared
from ratoon.core.request import EndedLease, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from ratoon.core.stats import SchedulerStats
from ratoon.engine.input.prepared_requests import PreparedRequests
from ratoon.engine.map import EngineMap, prompt_tokens_in
from ratoon.memory.block_events import BlockEvents
from ratoon.memory.encoder_cache import key_of_media
from ratoon.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from ratoon.engine.kv_events import KVEventPublisher

if TYPE_CHECKING:
    from ratoon.distributed.executor import Executor, StepHandle

logger = logging.getLogger(__name__)

SHORT_STEP_SECONDS = 0.002  # in which a host may not get done what it has to do for a step of many requests
IDLE_ROW = "idle"  # the runner's name of the row of an idle step; a request's has eight random characters behind it
MAX_SECONDS_OF_WAITING = 0.05  # in a step without any work, for requests that are being prepared


class StepDepth:
    """How many steps may be in flight. With two, the host has the time of one step to take a result, plan the step
    behind the next one and launch it. Where steps are shorter than that, a third keeps the device busy; where they are
    long, a third would only make new requests wait."""

    def __init__(self, steps: int, may_grow: bool) -> None:
        self._least = steps
        self._may_grow = may_grow
        self._last_result: float | None = None  # None: nothing was in flight behind it
        self._seconds: float | None = None  # from result to result, of late
        self.steps = steps

    def note_result(self, now: float, is_last: bool) -> None:
        if not self._may_grow:
            return
        if self._last_result is not None:
            seconds = now - self._last_result
            self._seconds = seconds if self._seconds is None else self._seconds + (seconds - self._seconds) / 8
            self.steps = self._least + (self._seconds < SHORT_STEP_SECONDS)
        self._last_result = None if is_last else now


class EngineCore:
    def __init__(self, config: EngineConfig, executor: Executor, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.executor = executor
        facts = executor.facts
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            facts.kv_config,
            facts.max_model_len,
            facts.swap_costs,
            config.speculation,
            config.adapters.num_slots,
            facts.draft_cost,
        )
        self._index: BlockIndex | None = None  # of blocks in a KV connector
        if config.cache.connectors:
            fingerprints = facts.rank_fingerprints or [facts.kv_config.fingerprint]
            self._index = open_index(open_connectors(config.cache.connectors), fingerprints)
            self.scheduler.kv_cache.store.connect(self._index)
        self._sending: dict[str, tuple[KVTransfer, int]] = {}  # by request id, with the length of the prompt
        self.preparing = PreparedRequests()
        self._clock = clock
        self.map = EngineMap(self.scheduler, executor, self.preparing, config.num_ranks, self.stats, clock)
        is_left_open = config.scheduler.max_steps_in_flight is None and facts.device.startswith("cuda")
        self._depth = StepDepth(config.scheduler.num_in_flight, is_left_open)
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()  # the oldest first
        self._pending: list[EngineCoreOutput] = []  # outputs that no step brought: aborts
        # Ids of aborted requests, or branches that a stop string ended
        self._aborts: queue.SimpleQueue[list[str] | dict[str, int | None]] = queue.SimpleQueue()
        self._step_lock = threading.Lock()  # held while a step runs: the scheduler then belongs to its thread
        self._running = threading.Event()  # not paused
        self._running.set()
        self._sleep_level = 0  # 0: awake
        self._publisher: KVEventPublisher | None = None
        self._tell_client: Callable[[list[Event]], None] | None = None
        self._experts: dict[int, list[int]] = {}  # SchedulerStats.experts
        self._has_new_experts = False  # that no step's outputs have had
        self.when_closed: Callable[[], None] = lambda: None
        self.num_passes = 0  # of the model over tokens, submitted so far

    def publish_events(self, publisher: KVEventPublisher) -> None:
        """Subscribers are told which blocks can be found here, from now on."""
        self._publisher = publisher
        self._collect_events()
        self._publish()

    def tell_client(self, tell: Callable[[list[Event]], None]) -> None:
        """From now on the client is told which blocks can be found here, as subscribers are. It begins with those that
        can be found now."""
        self._collect_events()
        self._tell_client = tell
        self.tell_blocks()

    def tell_blocks(self) -> None:
        """Tells the client anew which blocks can be found, because it has missed a message."""
        self._publish()
        events = self.scheduler.kv_cache.prefix_cache.events
        if self._tell_client is not None and events is not None:
            self._tell_client(events.known())

    def _collect_events(self) -> None:
        cache = self.scheduler.kv_cache.prefix_cache
        if cache.events is None:
            cache.collect_events(BlockEvents("GPU" if self.executor.facts.device.startswith("cuda") else "CPU"))

    def _publish(self) -> None:
        events = self.scheduler.kv_cache.prefix_cache.events
        if events is not None and (new := events.take()):
            if self._publisher is not None:
                self._publisher.publish(new)
            if self._tell_client is not None:
                self._tell_client(new)

    def add_request(self, request: EngineCoreRequest) -> None:
        """RequestError when it can never be served; nothing is kept of it then. One with structured output waits for
        its grammar first, and may fail then."""
        params, futures = request.generation_params, list[Future[Any]]()
        if request.kv_transfer is not None:
            self._transfers()  # refuses it where there are none
            if not request.kv_transfer.sends:
                transfer = request.kv_transfer
                futures.append(self.receive_blocks(transfer.name, transfer.address, is_awaited=True))
        if params is not None and params.structured_output is not None:
            futures.append(self.executor.collective_rpc("prepare_grammar", params.structured_output, request.owner))
        if self.config.encodes_only:
            inputs = {key_of_media(one.content_hash, request.cache_salt): one.data for one in request.mm_features}
            futures.append(self.executor.collective_rpc("encode_media", inputs))
        if request.encoded_at:
            places = {key_of_media(name, request.cache_salt): place for name, place in request.encoded_at.items()}
            futures.append(self.executor.collective_rpc("fetch_media", places))
        if all(future.done() for future in futures):
            for future in futures:
                future.result()
            self._add_prepared(request)
        else:
            self.preparing.add(request, futures[0] if len(futures) == 1 else all_done(futures), self._clock())

    def _add_prepared(self, request: EngineCoreRequest) -> None:
        if self.config.encodes_only:  # what it asks for is done
            self._pending.append(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.LENGTH))
            return
        self.scheduler.add_request(request, self._clock())
        if request.kv_transfer is not None and request.kv_transfer.sends:
            self._transfers().begin_sending(request.kv_transfer.name)
            self._sending[request.request_id] = request.kv_transfer, len(request.prompt_token_ids)

    # ---- blocks that go to other engines, and come from them ----

    @property
    def kv_address(self) -> str:
        """Where other engines get the blocks of this one. Empty: nowhere."""
        return self._index.address if isinstance(self._index, TransferIndex) else ""

    def _transfers(self) -> TransferIndex:
        if not isinstance(self._index, TransferIndex):
            problem = "this engine has no connector that moves blocks between engines"
            raise RequestError(FIELD, problem, 'leave it out, or start the engine with kv_connector="peers"')
        return self._index

    def receive_blocks(self, name: str, address: str, is_awaited: bool = False) -> Future[None]:
        """Begins to receive the blocks of a prompt that another engine computes; see TransferIndex."""
        try:
            return self._transfers().receive(name, address, self.scheduler.kv_cache.store.has, is_awaited)
        except ValueError as error:
            raise (
                error
                if isinstance(error, RequestError)
                else RequestError(FIELD, str(error), "what the engine that computed the prompt has answered")
            ) from None

    def _end_sending(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            if output.finished and output.request_id not in self.scheduler.state.requests:
                transfer, num_tokens = self._sending.pop(output.request_id, (None, 0))
                if transfer is not None:
                    self._transfers().end_sending(transfer.name)
                    output.kv_transfer_params = answer_of(transfer, self.kv_address, num_tokens)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Aborts requests, from any thread: at once or, while a step runs, before its outputs go out."""
        self.note_abort(request_ids)
        self._take_aborts_between_steps()

    def stop_requests(self, stopped: dict[str, int | None]) -> None:
        """Ends branches, from any thread, that a stop string ended on the other side: what they asked for at their end
        is done. See Scheduler.stop_requests."""
        self.note_abort(stopped)
        self._take_aborts_between_steps()

    def note_abort(self, ended: list[str] | dict[str, int | None]) -> None:
        """Ends these requests, from any thread, in the step under way, or with the next one. Unknown ids are ignored,
        so an abort that may be ahead of its request must be repeated after it."""
        self._aborts.put(ended)

    def _take_aborts_between_steps(self) -> None:
        if self._step_lock.acquire(blocking=False):  # else the step takes them
            try:
                self._take_aborts()
            finally:
                self._step_lock.release()

    def _take_aborts(self) -> None:
        while not self._aborts.empty():
            ended = self._aborts.get()
            if isinstance(ended, dict):
                self._pending += self.scheduler.stop_requests(ended)
            else:
                self._pending += self.preparing.abort(ended) + self.scheduler.abort_requests(ended)

    def _take_pending(self) -> list[EngineCoreOutput]:
        outputs, self._pending = self._pending, []
        return outputs

    def has_work(self) -> bool:
        return bool(self._pending) or bool(self._in_flight) or len(self.preparing) > 0 or self.scheduler.has_requests()

    @property
    def can_step(self) -> bool:
        """Whether `step` has work. During a pause that is only steps in flight and ends of requests."""
        has_own_work = bool(self._pending) or bool(self._in_flight) or self.preparing.has_ready
        return has_own_work or (self.scheduler.has_requests() and self._may_plan)

    @property
    def _may_plan(self) -> bool:
        return not self.paused and not self.asleep

    def step(self) -> EngineCoreOutputs:
        """One turn: plan what there is room for, and take the result of the oldest step in flight.

        While the engine is paused or asleep nothing is planned: results of what is in flight, aborts and deadlines are
        all that comes out. An exception while executing fails the request that it belongs to, and the engine goes on:
        if there are several in the step, each is tried alone to find out. DeviceLostError is raised: no later step
        could be executed.
        """
        with self._step_lock:
            self._take_aborts()
            self.expire_leases()
            if self.preparing:
                self._take_prepared()
            outputs = self._take_pending()
            advanced: dict[str, int] = {}
            self._fill_queue()
            if self._in_flight:
                plan, _ = self._in_flight[0]
                outputs += self._finish_oldest()
                advanced = plan.tokens_without_sample()
            if self._sending:
                self._end_sending(outputs)
            self._publish()
        if not self._aborts.empty():  # came while the lock was still held
            self._take_aborts_between_steps()
        return EngineCoreOutputs(outputs, self._stats_of_step(), self.scheduler.state.now, advanced=advanced)

    def _take_prepared(self) -> None:
        if not self._pending and not self._in_flight and not self.scheduler.has_requests():
            self.preparing.wait(MAX_SECONDS_OF_WAITING)  # there is nothing else to do
        self._pending += self.preparing.take_ready(self._add_prepared)

    def _fill_queue(self) -> None:
        while (plan := self._plan(num_ahead=len(self._in_flight))) is not None:
            self._in_flight.append((plan, self.executor.submit(plan)))
            self.num_passes += not plan.is_empty
            if self.map.is_watched:
                self.map.note_submitted(plan)

    def _plan(self, num_ahead: int) -> SchedulerOutput | None:
        """The next plan behind so many. None: there is none now."""
        may_plan = num_ahead < self._depth.steps and self.scheduler.has_requests() and self._may_plan
        if not may_plan or not self.scheduler.can_plan:
            return None
        plan = self.scheduler.schedule()
        return None if plan.is_void else plan  # void: it needs the result of a step in flight first

    def _finish_oldest(self) -> list[EngineCoreOutput]:
        plan, handle = self._in_flight[0]
        try:
            if self.scheduler.has_work_beside_step:
                handle.launch()
                self.scheduler.work_beside_step()
            asked = self._clock()
            result = handle.result()
        except DeviceLostError:  # no request can be isolated: what runs this core has to be started again
            raise
        except Exception as error:
            logger.exception("a step failed")
            outputs = self._isolate(plan, error)
            # Behind the failure: what a failed step may have spoilt must not be released as if it were good.
            self._take_aborts()
            return outputs + self._take_pending()
        self._in_flight.popleft()
        now = self._clock()
        self._depth.note_result(now, is_last=not self._in_flight)
        self.scheduler.step_done(plan, now, result.has_prepared)
        self._take_aborts()
        if not self.map.is_watched:
            return self._take_pending() + self.scheduler.update_from_output(plan, result)
        num_prompt_tokens = prompt_tokens_in(plan, self.scheduler.state.branches)
        outputs = self.scheduler.update_from_output(plan, result)
        self.map.note_step(plan, result, outputs, now - asked, num_prompt_tokens)
        return self._take_pending() + outputs

    def run_idle_step(self) -> None:
        """Runs the model over one padding token, which writes to the null block and is not sampled: the part that an
        engine without work has in a step of engines that step together."""
        num_groups = len(self.executor.facts.kv_config.groups)
        row = NewRequestData(IDLE_ROW, [0], 1, SamplingParams(), 0, tuple([0] for _ in range(num_groups)), 0)
        idle = SchedulerOutput(scheduled_new_reqs=[row], num_scheduled_tokens={IDLE_ROW: 1})
        idle.total_num_scheduled_tokens = 1
        self.num_passes += 1
        self.executor.submit(idle).result()
        self.executor.submit(SchedulerOutput(finished_req_ids=[IDLE_ROW])).result()

    def work_between_calls(self) -> None:
        """Does what makes the next requests faster; a caller in this process whose requests have ended, and which
        waits, calls this."""
        if not self._in_flight and not self.scheduler.has_unfinished_requests() and self._may_plan:
            if self.kv_address:  # another engine may wait for the last blocks
                self._tell_of_ended()
            self.executor.collective_rpc("work_between_calls").result()

    def _isolate(self, plan: SchedulerOutput, error: Exception) -> list[EngineCoreOutput]:
        """A step raised. Those after it were skipped: their requests are planned anew. Those in it give their memory
        back, and each is tried alone; one that was alone already is at fault."""
        self._drain()
        self.executor.collective_rpc("recover").result()
        return self.scheduler.step_failed(plan, f"{type(error).__name__}: {error}")

    def _drain(self) -> None:
        """Wait for what is in flight, and drop its results."""
        while self._in_flight:
            _, handle = self._in_flight[0]
            with suppress(Exception):
                handle.result()
            self._in_flight.popleft()

    def expire_leases(self) -> None:
        now = self._clock()
        self._pending += self.scheduler.tick(now)
        if self.preparing:
            self._pending += self.preparing.expire(now)

    def seconds_to_expiry(self) -> float | None:
        """The seconds until the next lease or deadline ends; None: there is none."""
        ends = (self.scheduler.next_expiry(), self.preparing.next_deadline())
        expiry = min((end for end in ends if end is not None), default=None)
        return None if expiry is None else max(0.0, expiry - self._clock())

    def restore_leases(self, leases: list[Any]) -> list[str]:
        """Leases of an earlier process go on, the first ones first; each is an encoded EndedLease. Returns the branches
        of those that do."""
        return self.scheduler.restore_leases(msgspec.convert(leases, prepared(list[EndedLease])), self._clock())

    def end_leases(self, branch_ids: list[str]) -> int:
        """Give the memory of ended branches back now. How many there were."""
        return sum(self.scheduler.leases.end(branch_id) for branch_id in branch_ids)

    def end_leases_of(self, root_id: str, owner: str | None, of_any_owner: bool = False) -> int:
        """Gives the memory back that is leased for an ended request, by its owner's id of it. Returns how many leases
        there were."""
        leases = self.scheduler.leases
        found = [
            lease.branch_id
            for lease in (*leases, *leases.moved())
            if lease.root_id == root_id and (of_any_owner or lease.owner == owner)
        ]
        return self.end_leases(found)

    def forget_roots(self, branch_ids: list[str]) -> None:
        """Drops what is kept of the texts of these branches to draft from."""
        self.scheduler.forget_roots(branch_ids)

    def reset_prefix_cache(self) -> bool:
        """False while requests hold blocks."""
        is_empty = self.scheduler.reset_prefix_cache()
        self._publish()
        return is_empty

    def stats(self) -> SchedulerStats:
        """Figures as they are now; of the experts' rows, those that a worker has read last."""
        stats = self.scheduler.stats()
        stats.num_waiting += len(self.preparing)
        of_worker = self.executor.stats
        if of_worker.graphs is not None:
            stats.graphs = of_worker.graphs
        if of_worker.experts:
            self._experts, self._has_new_experts = of_worker.experts, True
        stats.experts = self._experts
        stats.num_media_runs = of_worker.num_media_runs
        return stats

    def _stats_of_step(self) -> SchedulerStats:
        """The rows of experts are thousands of numbers: the outputs of a step have those that none have had yet."""
        stats = self.stats()
        if not self._has_new_experts:
            stats.experts = {}
        self._has_new_experts = False
        return stats

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    def pause(self) -> None:
        """Take no further step. Requests keep their place and their memory, and new ones queue up. From any thread, as
        is `resume`."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def wait_while_paused(self, seconds: float) -> None:
        """Returns when the engine is resumed, or after so many seconds, for a caller that would otherwise spin."""
        self._running.wait(seconds)

    @property
    def asleep(self) -> bool:
        return self._sleep_level > 0

    def sleep(self, level: int = 1) -> None:
        """Free memory while there are no requests: the KV cache (1), the weights as well (2). An engine that sleeps at
        level 1 can be put to level 2."""
        if level not in (1, 2):
            raise RequestError("level", f"{level!r} is unknown", "1: free the KV cache; 2: free the weights as well")
        if self._sleep_level >= level:
            return
        if self.scheduler.has_unfinished_requests() or self.preparing:
            raise RequestError("sleep", "requests are under way", "wait for their end, or abort them")
        self._settle_ended()
        if not self.scheduler.reset_prefix_cache():
            raise RequestError("sleep", "blocks of the KV cache are held", "wait for what holds them")
        self._publish()
        self.executor.collective_rpc("sleep", level).result()
        self._sleep_level = level

    def _settle_ended(self) -> None:
        """Leaves nothing in flight after the last request, and tells of its end."""
        while self._in_flight:
            self._pending += self._finish_oldest()
        self._tell_of_ended()

    def _tell_of_ended(self) -> None:
        """Runs the step after the last request: the runner drops its rows, and its blocks go where they are kept."""
        while self.scheduler.has_requests() and not self.scheduler.has_unfinished_requests():
            self._in_flight.append((plan := self.scheduler.schedule(), self.executor.submit(plan)))
            self._pending += self._finish_oldest()

    def wake_up(self) -> None:
        """Allocate the memory again; requests that arrived in the meantime are answered."""
        if self.asleep:
            self.executor.collective_rpc("wake_up").result()
            self._sleep_level = 0

    def shutdown(self) -> None:
        if self._index is not None and not self.scheduler.has_unfinished_requests() and self._may_plan:
            with suppress(Exception):  # of a device that is gone: what it held is lost
                self._settle_ended()
        self.executor.close()
        if self._index is not None:
            self._index.close()
        if self._publisher is not None:
            self._publisher.close()
        self.when_closed()
