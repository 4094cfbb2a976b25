"""EngineMap: what an engine core is doing, for those who watch it.

Nothing is collected unless a watcher has asked within the last seconds. Then a step adds one line to the timeline, and
the pool notes which blocks change, so that a report takes as long as what has changed, not as the pool is large.
Reports are made between steps, on the core's thread.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ratoon.core.engine_map import (
    NUM_STEPS,
    BlockCode,
    EngineMapReport,
    MapFigures,
    MappedLease,
    MappedRequest,
    MappedStep,
    Ranges,
)
from ratoon.core.kv import NULL_BLOCK
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import BeamSearchParams, PoolingParams, SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreOutput, Extraction
from ratoon.core.stats import SchedulerStats
from ratoon.engine.input.prepared_requests import PreparedRequests
from ratoon.memory.block_pool import Block
from ratoon.memory.sequence import TokenSequence
from ratoon.scheduling.branch import Branch, BranchStatus, Request
from ratoon.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from ratoon.distributed.executor import Executor

SECONDS_WITHOUT_WATCHER = 15.0  # after which a watcher that has not asked again is forgotten
MOST_OF_A_STEP = 0.5
KINDS: dict[type, str] = {
    SamplingParams: "generate",
    BeamSearchParams: "beams",
    PoolingParams: "pool",
    Extraction: "extract",
}


class Watcher:
    """What one watcher has been told."""

    def __init__(self, num_steps: int) -> None:
        self.asked = 0.0  # when it asked last
        self.changed: dict[int, int] | None = None  # block codes since then; None: it has no map yet
        self.num_steps = num_steps  # that it knows
        self.told: dict[str, tuple[int, ...]] = {}  # request id, or lease → its blocks


class EngineMap:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        preparing: PreparedRequests,
        num_ranks: int,
        stats: Callable[[], SchedulerStats],
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`stats` and `clock` are the core's."""
        self._scheduler = scheduler
        self._executor = executor
        self._preparing = preparing
        self._num_ranks = num_ranks
        self._stats = stats
        self._clock = clock
        self._wall_clock = wall_clock
        self._run_id = secrets.token_hex(8)
        self._watchers: dict[str, Watcher] = {}
        self._codes = bytearray()
        self._offset = 0.0  # from the core's clock to seconds since 1970
        self._steps: deque[MappedStep] = deque(maxlen=NUM_STEPS)
        self._num_steps = 0  # that were in the timeline so far
        self._submitted: dict[int, float] = {}  # step number → when it was handed over
        self._last_result = 0.0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_preemptions = 0

    @property
    def is_watched(self) -> bool:
        return bool(self._watchers)

    # ---- steps; called only while it is watched ----

    def note_submitted(self, plan: SchedulerOutput) -> None:
        self._submitted[plan.step] = self._clock()

    def note_step(
        self,
        plan: SchedulerOutput,
        result: ModelRunnerOutput,
        outputs: Iterable[EngineCoreOutput],
        seconds_waited: float,
        prompt_tokens: int,
    ) -> None:
        """A step has ended, and its results were applied. `seconds_waited`: for its result; `prompt_tokens`: what it
        computed of prompts."""
        now = self._clock()
        began = max(self._submitted.pop(plan.step, now), self._last_result)
        self._last_result = now
        for step in [step for step in self._submitted if step < plan.step]:
            del self._submitted[step]  # it failed, or was skipped
        self._forget_silent(now)
        if plan.is_empty:
            return
        num_tokens = sum(len(output.new_token_ids) for output in outputs)
        seconds = max(0.0, now - began)
        self._num_prompt_tokens += prompt_tokens
        self._num_output_tokens += num_tokens
        self._num_steps += 1
        self._steps.append(
            MappedStep(
                round(now + self._offset, 4),
                round(1000 * seconds, 3),
                prompt_tokens,
                num_tokens,
                len(plan.req_ids),
                self._waited_for(plan, result, seconds_waited > MOST_OF_A_STEP * seconds),
            )
        )

    def _waited_for(self, plan: SchedulerOutput, result: ModelRunnerOutput, waited_long: bool) -> str:
        scheduler = self._scheduler
        num_preemptions, self._num_preemptions = self._num_preemptions, scheduler.preemption.num_preemptions
        if result.late:
            return "masks"
        if plan.loads or plan.awaits_loads or scheduler.state.wants_drain or self._num_preemptions > num_preemptions:
            return "blocks"
        if plan.awaits_adapters:
            return "adapters"
        return "device" if waited_long else ""

    # ---- reports ----

    def report(self, watcher_id: str, index: int = 0) -> EngineMapReport:
        """What changed since this watcher asked last; all of it, if it asks for the first time or after long."""
        start = time.perf_counter()
        now = self._clock()
        self._forget_silent(now)
        if not self._watchers:
            self._begin(now)
        self._read_blocks()
        watcher = self._watchers.get(watcher_id)
        if watcher is None:
            watcher = self._watchers[watcher_id] = Watcher(self._num_steps - len(self._steps))
        watcher.asked = now
        changed, watcher.changed = watcher.changed, {}
        num_new = min(self._num_steps - watcher.num_steps, len(self._steps))
        watcher.num_steps = self._num_steps
        kv_cache = self._scheduler.kv_cache
        told = watcher.told
        watcher.told = {}
        made = EngineMapReport(
            index=index,
            block_size=kv_cache.block_size,
            num_blocks=kv_cache.pool.num_blocks,
            num_groups=kv_cache.num_groups,
            figures=self._figures(self._stats()),
            requests=self._requests(told, watcher.told),
            leases=self._leases(told, watcher.told),
            steps=[self._steps[place] for place in range(len(self._steps) - num_new, len(self._steps))],
            num_steps=self._num_steps,
            run_id=self._run_id,
            blocks=bytes(self._codes) if changed is None else None,
            changed=changed or {},
            num_host_blocks=kv_cache.num_slots,
            num_used_host_blocks=0 if kv_cache.store.tier is None else kv_cache.store.tier.num_filled_blocks,
        )
        made.seconds = time.perf_counter() - start
        return made

    def _begin(self, now: float) -> None:
        """The first watcher is there: from now on changes are noted."""
        pool = self._scheduler.kv_cache.pool
        self._offset = self._wall_clock() - now
        self._last_result = now
        self._num_preemptions = self._scheduler.preemption.num_preemptions
        pool.changed = set(range(pool.num_blocks))
        self._codes = bytearray(pool.num_blocks)

    def _forget_silent(self, now: float) -> None:
        silent = [name for name, one in self._watchers.items() if now - one.asked > SECONDS_WITHOUT_WATCHER]
        for name in silent:
            del self._watchers[name]
        if silent and not self._watchers:
            self._end()

    def _end(self) -> None:
        self._scheduler.kv_cache.pool.changed = None
        self._codes = bytearray()
        self._steps.clear()
        self._submitted.clear()

    def _read_blocks(self) -> None:
        """Brings the codes up to date, and notes for every watcher which of them changed."""
        scheduler = self._scheduler
        pool, leases, codes = scheduler.kv_cache.pool, scheduler.leases, self._codes
        assert pool.changed is not None
        of_cross = leases.cross_blocks()
        ids, pool.changed = pool.changed.union(of_cross), set()
        blocks = pool.blocks
        news: dict[int, int] = {}
        for block_id in ids:
            block = blocks[block_id]
            if block.ref_cnt == 0:
                code = BlockCode.FREE if block.block_hash is None else BlockCode.CACHED
                if block_id == NULL_BLOCK:
                    code = BlockCode.NULL
            elif of_cross.get(block_id, False) or leases.is_leased_only(block):
                code = BlockCode.LEASED
            else:
                code = BlockCode.USED
            if codes[block_id] != code:
                codes[block_id] = news[block_id] = int(code)
        if news:
            for watcher in self._watchers.values():
                if watcher.changed is not None:
                    watcher.changed.update(news)

    def _requests(self, told: dict[str, tuple[int, ...]], tell: dict[str, tuple[int, ...]]) -> list[MappedRequest]:
        found = []
        for request in self._scheduler.state.requests.values():
            ids = _ids_of(_blocks_of_request(request))
            found.append(
                MappedRequest(
                    request.request_id,
                    request.external_id,
                    request.owner,
                    any(branch.status == BranchStatus.RUNNING for branch in request.branches),
                    KINDS[self._scheduler.kinds.of(request).params_type],
                    round(request.added_time + self._offset, 3),
                    request.num_prompt_tokens,
                    _num_output_tokens(request),
                    _news(request.request_id, ids, told, tell),
                )
            )
        for waiting, since in self._preparing.waiting():
            kind, external_id = KINDS[type(waiting.params)], waiting.external_id or waiting.request_id
            began, num_tokens = round(since + self._offset, 3), len(waiting.prompt_token_ids)
            blocks = _news(waiting.request_id, (), told, tell)
            found.append(
                MappedRequest(waiting.request_id, external_id, waiting.owner, False, kind, began, num_tokens, 0, blocks)
            )
        return found

    def _leases(self, told: dict[str, tuple[int, ...]], tell: dict[str, tuple[int, ...]]) -> list[MappedLease]:
        """One for each ended request: the leases of its texts together."""
        found: dict[tuple[str | None, str], MappedLease] = {}
        blocks: dict[tuple[str | None, str], list[Block]] = {}
        for lease in self._scheduler.leases:
            key = lease.owner, lease.root_id
            one = found.get(key)
            if one is None:
                one = found[key] = MappedLease(lease.root_id, lease.owner, 0.0, 0)
            one.ends = max(one.ends, round(lease.expires_at + self._offset, 3))
            one.num_tokens += lease.sequence.num_tokens
            blocks.setdefault(key, []).extend(_blocks_of(lease.sequence))
        for moved in self._scheduler.leases.moved():
            key = moved.owner, moved.root_id
            one = found.setdefault(key, MappedLease(moved.root_id, moved.owner, 0.0, 0, place=str(moved.place)))
            one.ends = max(one.ends, round(moved.expires_at + self._offset, 3))
            one.num_tokens += moved.num_tokens
            blocks.setdefault(key, [])
        for (owner, root_id), one in found.items():
            one.blocks = _news(f"lease {owner} {root_id}", _ids_of(blocks[owner, root_id]), told, tell)
        return list(found.values())

    def _figures(self, stats: SchedulerStats) -> MapFigures:
        drafts = stats.drafts.values()
        return MapFigures(
            stats.num_running,
            stats.num_waiting,
            round(stats.kv_usage, 4),
            self._memory_bytes(),
            self._num_prompt_tokens,
            self._num_output_tokens,
            stats.prefix_cache.queries,
            stats.prefix_cache.hits,
            sum(one.draft_tokens for one in drafts),
            sum(one.accepted_tokens for one in drafts),
        )

    def _memory_bytes(self) -> int:
        """What the engine has of its device's memory; on a CPU in one process, what the process has."""
        facts, graphs, num_ranks = self._executor.facts, self._executor.stats.graphs, self._num_ranks
        if num_ranks == 1 and facts.device.startswith("cpu"):
            return resident_bytes() or facts.weight_bytes + facts.kv_bytes
        of_rank = facts.weight_bytes + facts.kv_bytes + facts.step_bytes + (0 if graphs is None else graphs.num_bytes)
        return num_ranks * of_rank


def resident_bytes() -> int:
    """The memory of this process, in whole MiB; 0 where the system does not tell in a file."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20 * 2**20
    except OSError:
        return 0


def prompt_tokens_in(plan: SchedulerOutput, branches: Mapping[str, Branch]) -> int:
    """The tokens of prompts that a plan computes, of branches that have not ended."""
    total = sum(len(capture.token_ids) for capture in plan.captures)
    counts = plan.num_scheduled_tokens
    for new in plan.scheduled_new_reqs:
        scheduled = counts.get(new.req_id, 0)
        total += max(0, min(new.num_prompt_tokens - new.num_computed_tokens, scheduled))
    cached = plan.scheduled_cached_reqs
    if len(plan.sampled_req_ids) == plan.total_num_scheduled_tokens:
        return total  # one token of each branch, as in most steps; a prompt's last token alone is not told apart
    for name, num_computed in zip(cached.req_ids, cached.num_computed_tokens):
        branch = branches.get(name)
        if branch is not None and num_computed < branch.request.num_prompt_tokens:
            total += min(branch.request.num_prompt_tokens - num_computed, counts.get(name, 0))
    return total


def _num_output_tokens(request: Request) -> int:
    num_tokens = sum(branch.num_tokens - request.num_prompt_tokens for branch in request.branches)
    return max(num_tokens, 0) + request.task.num_tail_tokens


def _blocks_of_request(request: Request) -> list[Block]:
    found: list[Block] = []
    for branch in request.branches:
        found += _blocks_of(branch)
    for tables in request.task.tails():
        for table in tables:
            found += table
    return found


def _blocks_of(sequence: TokenSequence) -> list[Block]:
    found: list[Block] = []
    for table in sequence.block_tables:
        found += table
    if sequence.cross is not None:
        found += sequence.cross.blocks
    return found


def _ids_of(blocks: list[Block]) -> tuple[int, ...]:
    ids = {block.block_id for block in blocks}
    ids.discard(NULL_BLOCK)
    return tuple(sorted(ids))


def _news(
    name: str, ids: tuple[int, ...], told: dict[str, tuple[int, ...]], tell: dict[str, tuple[int, ...]]
) -> Ranges | None:
    """The ranges of these blocks; None: a watcher was told the same before."""
    tell[name] = ids
    return None if told.get(name) == ids else ranges_of(ids)


def ranges_of(ids: Iterable[int]) -> Ranges:
    """Runs of rising numbers: the first and the last of each."""
    found: Ranges = []
    for number in ids:
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found
