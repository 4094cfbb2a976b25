"""The scheduler and its memory against a runner that notices every wrong slot, under random load."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ratoon.core.config import CacheConfig, SchedulerConfig, SchedulingPolicy
from ratoon.core.errors import RequestError
from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams
from ratoon.core.plan import MAX_CAPTURE_SPANS, SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, Extraction, FinishReason, ResumedChoice
from ratoon.core.wire import WireTensor
from ratoon.scheduling.branch import branch_id_of, branch_seed
from ratoon.scheduling.scheduler import Scheduler
from tests.property.extractions import Reading, readings, rows_of
from tests.property.fake_runner import (
    FakeRunner,
    reference_states,
    reference_texts,
    reference_tokens,
    reference_vector,
)

VOCABULARY = 6
EOS = 5
MAX_STEPS = 3000
# What pools hold of the longest sequence: just that, or a few; sometimes less.
FAMILIES = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 1, 2, 2, 3, 3, 4, 4], [1, 2, 3, 4, 2, 2, 2, 2], []]
POOL_SHARES = {"any": [0.6, 1.0, 1.0, 1.2, 1.6, 2.5], "rooted": [2.0, 4.0, 8.0], "searching": [1.5, 2.0, 2.5, 3.0]}


@dataclass
class Child:
    """A continuation of an earlier request, as far as that one has come by then."""

    step: int
    parent: int  # its number
    choice: int
    num_left_out: int  # of the parent's tokens, from the end
    suffix: list[int]
    retain_kv: float | None
    params: SamplingParams


@dataclass
class Load:
    """Everything that happens in one example."""

    scheduler: SchedulerConfig
    kv: KVCacheConfig
    caching: bool
    max_model_len: int
    burst: int
    arrivals: dict[int, list[EngineCoreRequest]]  # step → requests
    aborts: dict[int, list[str]]
    mid_step_aborts: dict[int, list[str]]  # while the step runs
    raising_steps: set[int]
    bad_rows: set[int]  # steps in which the first sampled branch has NaN logits, or the first vector a NaN
    restarts: set[int]  # steps before which the engine dies and another one goes on
    children: list[Child]
    readings: list[Reading]
    lease_fraction: float
    ended_leases: dict[int, list[str]]
    apart: bool  # are the requests of a step that raises tried one by one?


@dataclass
class Received:
    tokens: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    prompt_positions: list[int] = field(default_factory=list)
    pooled: WireTensor | None = None
    rows: list[list[int]] = field(default_factory=list)  # of an extraction, each with a number for every layer
    finish: FinishReason | None = None
    score: float | None = None


@st.composite
def kv_configs(draw: st.DrawFn, max_model_len: int, shares: list[float]) -> KVCacheConfig:
    block_size = draw(st.integers(1, 5))
    full = FullAttentionSpec(block_size, 1, 8, 2)
    window = SlidingWindowSpec(block_size, 1, 8, 2, window=draw(st.integers(1, 12)))
    wide = SlidingWindowSpec(block_size, 1, 8, 2, window=draw(st.integers(13, 20)))
    specs = draw(st.sampled_from([[full], [full], [window], [full, window], [window, full], [full, window, wide]]))
    groups = tuple(KVCacheGroup(spec, (layer,)) for layer, spec in enumerate(specs))
    blocks_of_longest = len(groups) * -(-max_model_len // block_size)
    share = draw(st.sampled_from(shares))
    return KVCacheConfig(2 + int(share * blocks_of_longest), block_size, groups)


@st.composite
def beam_params(draw: st.DrawFn, stops: list[int]) -> BeamSearchParams:
    width = draw(st.sampled_from([1, 2, 3, 4, 6, 9]))
    max_tokens = draw(st.integers(1, 14))
    return BeamSearchParams(
        beam_width=width,
        n=draw(st.integers(1, min(width, VOCABULARY - len(stops)))),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(3, max_tokens))),
        length_penalty=draw(st.sampled_from([0.0, 1.0, -1.0])),
        early_stopping=draw(st.sampled_from([True, False, "never"])),
        all_stop_token_ids=stops,
        output_kind=draw(st.sampled_from([RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE])),
    )


@st.composite
def requests(draw: st.DrawFn, index: int, searching: bool = False) -> EngineCoreRequest:
    family = draw(st.sampled_from(FAMILIES))
    prompt = family[: draw(st.integers(0, 16))] + draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    stops = draw(st.sampled_from([[], [], [EOS], [EOS, 0]]))
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 24)))
    params = SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 2, 3, 5])),
        seed=draw(st.one_of(st.none(), st.integers(0, 3))),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(3, max_tokens or 3))),
        all_stop_token_ids=stops,
        stop_token_ids=stops[1:],
        logprobs=draw(st.sampled_from([None, 0])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
    )
    pooling = draw(st.sampled_from([None, None, None, None, "last", "mean"]))
    is_search = pooling is None and draw(st.sampled_from([True, True, False] if searching else [True, False, False]))
    beams = draw(beam_params(stops)) if is_search else None
    if pooling is not None:
        params = SamplingParams(max_tokens=1, detokenize=False)
    elif beams is not None:
        params = SamplingParams(n=beams.n, max_tokens=beams.max_tokens)
    return EngineCoreRequest(
        f"r{index}",
        prompt,
        params,
        beam_params=beams,
        arrival_time=float(index),
        priority=draw(st.integers(0, 2)),
        cache_salt=draw(st.sampled_from([None, None, "a", "b"])),
        pooling_params=None if pooling is None else PoolingParams(pooling=pooling),
        retain_kv=draw(st.sampled_from([1000.0, 1000.0, 4.0, None])),
    )


@st.composite
def children(draw: st.DrawFn, num_parents: int) -> Child:
    return Child(
        step=draw(st.integers(3, 60)),
        parent=draw(st.integers(0, num_parents - 1)),
        choice=draw(st.sampled_from([0, 0, 1, 2])),
        num_left_out=draw(st.sampled_from([0, 0, 0, 1, 2, 5])),
        suffix=draw(st.lists(st.integers(0, 4), max_size=4)),
        retain_kv=draw(st.sampled_from([None, 4.0, 1000.0])),
        params=SamplingParams(
            n=draw(st.sampled_from([1, 1, 3])),
            seed=draw(st.integers(0, 3)),
            max_tokens=draw(st.integers(1, 12)),
            all_stop_token_ids=[],
        ),
    )


@st.composite
def loads(
    draw: st.DrawFn, restarting: bool = False, rooted: bool = False, searching: bool = False, reading: bool = False
) -> Load:
    """`rooted`: memory for leases, and many continuations; `searching`: many beams, and memory for a few of them;
    `reading`: many extractions."""
    all_requests = [draw(requests(index, searching)) for index in range(draw(st.integers(1, 10)))]
    arrivals: dict[int, list[EngineCoreRequest]] = defaultdict(list)
    for request in all_requests:
        arrivals[draw(st.sampled_from([0, 0, 1, 2, 5, 12, 20]))].append(request)
    all_readings = draw(st.lists(readings(len(all_requests), FAMILIES), max_size=12 if reading else 3))
    ids = [request.request_id for request in all_requests] + [f"x{number}" for number in range(len(all_readings))]
    some_steps = st.dictionaries(st.integers(0, 25), st.lists(st.sampled_from(ids), max_size=2), max_size=2)
    max_model_len = draw(st.integers(16, 40))
    rare_steps = st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, 25), max_size=2))
    return Load(
        SchedulerConfig(
            max_num_batched_tokens=draw(st.one_of(st.integers(1, 40), st.integers(20, 60))),
            max_num_seqs=draw(st.integers(4, 12) if searching else st.integers(1, 8)),
            max_prefill_chunk=draw(st.one_of(st.none(), st.integers(1, 9))),
            policy=draw(st.sampled_from(SchedulingPolicy)),
            enable_chunked_prefill=draw(st.sampled_from([True, True, False])),
        ),
        draw(kv_configs(max_model_len, POOL_SHARES["rooted" if rooted else "searching" if searching else "any"])),
        caching=draw(st.sampled_from([True, True, True, False])),
        max_model_len=max_model_len,
        burst=draw(st.sampled_from([1, 1, 3])),
        arrivals=arrivals,
        aborts=draw(some_steps),
        mid_step_aborts=draw(some_steps),
        raising_steps=set(draw(rare_steps)),
        bad_rows=set(draw(rare_steps)),
        restarts=draw(st.sets(st.integers(1, 30), min_size=1, max_size=3)) if restarting else set(),
        children=draw(st.lists(children(len(all_requests)), min_size=3 if rooted else 0, max_size=8 if rooted else 5)),
        readings=all_readings,
        lease_fraction=draw(st.sampled_from([0.5, 1.0] if rooted else [0.0, 0.3, 0.5, 1.0])),
        ended_leases=draw(some_steps),
        apart=draw(st.booleans()),
    )


class Drive:
    """Runs one load to its end, checking as it goes."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.salts: dict[str, int] = {}
        self.sequences: dict[str, list[int]] = {}  # that are read out
        self.accepted: dict[str, EngineCoreRequest] = {}
        self.received: dict[tuple[str, int], Received] = defaultdict(Received)
        self.start()

    def start(self) -> None:
        load = self.load
        self.scheduler = Scheduler(
            load.scheduler,
            CacheConfig(enable_prefix_caching=load.caching, lease_fraction=load.lease_fraction),
            load.kv,
            load.max_model_len,
        )
        self.runner = FakeRunner(load.kv, self.salts, self.sequences, VOCABULARY, load.burst)

    def restart(self) -> None:
        """All is lost but what callers have received: a new engine goes on from there."""
        self.start()
        for request in self.accepted.values():
            choices = [self.received[request.request_id, choice] for choice in range(request.sampling_params.n)]
            if all(received.finish is not None for received in choices):
                continue
            choices[0].rows.clear()  # hidden states come from the beginning again
            if request.beam_params is None and any(received.tokens for received in choices):
                event("resumed")
                resumed = [ResumedChoice(received.tokens.copy(), received.finish is not None) for received in choices]
                request = msgspec.structs.replace(request, resumed=resumed)
            self.scheduler.add_request(request)
            self.scheduler.check()

    def run(self) -> None:
        later = [*self.load.children, *self.load.readings]
        last_arrival = max([*self.load.arrivals, *(one.step for one in later)])
        for step in range(MAX_STEPS):
            if step in self.load.restarts:
                self.restart()
            self.take(self.scheduler.tick(float(step)))
            for branch_id in self.load.ended_leases.get(step, []):
                self.scheduler.leases.end(branch_id)
            for number, child in enumerate(self.load.children):
                if child.step == step:
                    self.arrive_child(f"c{number}", child)
            for number, reading in enumerate(self.load.readings):
                if reading.step == step:
                    self.arrive_reading(f"x{number}", reading)
            for request in self.load.arrivals.get(step, []):
                self.arrive(request)
            self.take(self.scheduler.abort_requests(self.load.aborts.get(step, [])))
            if step > last_arrival and not self.scheduler.has_requests():
                return
            self.step(step)
            self.scheduler.check()
        raise AssertionError(f"not done after {MAX_STEPS} steps: {self.scheduler.stats()}")

    def arrive(self, request: EngineCoreRequest) -> None:
        try:
            self.scheduler.add_request(request)
        except RequestError as error:
            event(f"refused: {error.field}")
            return
        self.accepted[request.request_id] = request
        self.sequences[request.request_id] = request.prompt_token_ids
        self.salts[request.request_id] = hash(tuple(map(ord, request.cache_salt or "")))

    def arrive_child(self, name: str, child: Child) -> None:
        parent = self.accepted.get(f"r{child.parent}")
        if parent is None or parent.pooling_params is not None or child.choice >= parent.sampling_params.n:
            return
        received = self.received[parent.request_id, child.choice]
        if received.finish in (FinishReason.ABORT, FinishReason.ERROR):
            return
        if parent.beam_params is not None and received.finish is None:
            return
        tokens = parent.prompt_token_ids + received.tokens
        tokens = tokens[: max(1, len(tokens) - child.num_left_out)]
        kind = "a beam search" if parent.beam_params is not None else "a parent"
        event(f"continuation of {kind} that " + ("runs" if received.finish is None else "has ended"))
        self.arrive(
            EngineCoreRequest(
                name,
                tokens + child.suffix,
                child.params,
                arrival_time=100.0 + child.step,
                cache_salt=parent.cache_salt,
                continuation_of=branch_id_of(parent.request_id, child.choice),
                continuation_token_ids=child.suffix,
                retain_kv=child.retain_kv,
            )
        )

    def arrive_reading(self, name: str, reading: Reading) -> None:
        if reading.parent is None:
            event("extraction of a prompt of its own")
            self.arrive(reading.request(name, reading.prompt, reading.salt, None))
            return
        parent = self.accepted.get(f"r{reading.parent}")
        if parent is None or reading.choice >= parent.sampling_params.n:
            return
        received = self.received[parent.request_id, reading.choice]
        tokens = [
            *parent.prompt_token_ids,
            *([] if parent.beam_params and received.finish is None else received.tokens),
        ]
        event("extraction of a parent that " + ("runs" if received.finish is None else "has ended"))
        branch_id = branch_id_of(parent.request_id, reading.choice)
        self.arrive(reading.request(name, tokens, parent.cache_salt, branch_id))

    def step(self, step: int) -> None:
        on_trial = bool(self.scheduler.roster.on_trial)  # then others give way to the one that is tried
        plan = self.scheduler.schedule()
        self.scheduler.check()
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=SchedulerOutput)
        assert decoded == plan
        self.check_limits(plan)
        result = self.runner.execute(decoded)
        if step in self.load.raising_steps:
            self.runner.spoil(plan, self.held_elsewhere(plan))
            if not (self.load.apart and plan.req_ids and self.scheduler.try_apart(plan)):
                self.take(self.scheduler.fail_requests(plan.req_ids, "the device is on fire"))
            return
        self.take(self.scheduler.abort_requests(self.load.mid_step_aborts.get(step, [])))
        if step in self.load.bad_rows and (result.req_ids or self.other_values(result)):
            self.drop_row(result)
        self.take(self.scheduler.update_from_output(plan, result))
        if plan.preempted_req_ids and not on_trial:
            event("preempted")
            from_nothing = [new for new in plan.scheduled_new_reqs if new.num_computed_tokens == 0]
            assert not from_nothing, "admitted while preempting"
        if plan.block_copies:
            event("copied on write")
        for beam_step in plan.beam_steps:
            event("beams that catch up" if beam_step.num_tokens > 1 else "beams")

    def held_elsewhere(self, plan: SchedulerOutput) -> set[int]:
        """Blocks that others hold than those who run: leases, and extractions that have a break."""
        roster = self.scheduler.roster
        idle = [state.branch for state in roster.extractions.running if state.branch.branch_id not in plan.req_ids]
        tables = [table for holder in [*self.scheduler.leases.sequences(), *idle] for table in holder.block_tables]
        return {block.block_id for table in tables for block in table}

    def other_values(self, result: ModelRunnerOutput) -> dict[str, Any]:
        """What is no token."""
        return result.pooled or result.candidates or result.hidden_states

    def drop_row(self, result: ModelRunnerOutput) -> None:
        if result.req_ids:
            bad_id = result.req_ids.pop(0)
            result.sampled_token_ids.pop(0)
            result.logprobs.pop(bad_id, None)
        else:
            values = self.other_values(result)
            bad_id = next(iter(values))
            del values[bad_id]
        result.errors[bad_id] = "NaN"

    def check_limits(self, plan: SchedulerOutput) -> None:
        config = self.load.scheduler
        assert plan.total_num_scheduled_tokens <= config.max_num_batched_tokens
        beams = [beam_step for beam_step in plan.beam_steps if beam_step.num_tokens]
        assert len(plan.num_scheduled_tokens) + sum(step.num_beams for step in beams) <= config.max_num_seqs
        longest = max(plan.num_scheduled_tokens.values(), default=0)
        if config.enable_chunked_prefill and config.max_prefill_chunk is not None:
            assert longest <= config.max_prefill_chunk
            for beam_step in beams:
                assert beam_step.num_tokens <= max(1, config.max_prefill_chunk // beam_step.num_beams)
        assert sum(len(capture.spans) for capture in plan.captures) <= MAX_CAPTURE_SPANS
        for capture in plan.captures:
            assert 0 < len(capture.token_ids) <= self.scheduler.planner.max_step_tokens
        if plan.is_empty:
            assert not self.scheduler.has_unfinished_requests(), "nothing runs although something waits"

    def take(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            received = self.received[output.request_id, output.choice]
            assert received.finish is None, "an output after the end"
            request = self.accepted[output.request_id]
            # One token is always computed, except where nothing is generated behind it.
            most_cached = len(request.prompt_token_ids) - (request.extraction is None)
            assert output.num_cached_tokens <= most_cached
            received.tokens = output.new_token_ids if output.replaces else received.tokens + output.new_token_ids
            received.score = output.score
            received.finish = output.finish_reason
            if output.inherited_from is not None:
                event(f"inherited from: {output.inherited_from}")
            received.pooled = output.pooled
            if output.hidden_states is not None:
                assert output.first_row == len(received.rows), "rows are missing, or came twice"
                received.rows += rows_of(output.hidden_states)
                assert output.num_rows_run >= len(received.rows)
            if output.new_logprobs is not None:
                received.num_logprobs += len(output.new_logprobs.token_ids)
            for chunk in output.prompt_logprobs or []:
                received.prompt_positions += range(chunk.start, chunk.start + len(chunk.rows.token_ids))


@settings(max_examples=max(400, settings.default.max_examples))
@given(loads())
def test_every_request_ends_with_the_tokens_it_would_get_alone(load: Load) -> None:
    drive = Drive(load)
    drive.run()
    check_results(drive)


@settings(max_examples=max(200, settings.default.max_examples))
@given(loads(rooted=True))
def test_continuations_end_with_the_tokens_of_the_whole_text(load: Load) -> None:
    drive = Drive(load)
    drive.run()
    check_results(drive)


@settings(max_examples=max(300, settings.default.max_examples))
@given(loads(restarting=True))
def test_requests_that_go_on_in_a_new_engine_end_with_the_same_tokens_each_once(load: Load) -> None:
    drive = Drive(load)
    drive.run()
    check_results(drive)


@settings(max_examples=max(300, settings.default.max_examples))
@given(loads(searching=True))
def test_beam_searches_end_with_the_texts_they_would_find_alone(load: Load) -> None:
    drive = Drive(load)
    drive.run()
    check_results(drive)


@settings(max_examples=max(250, settings.default.max_examples))
@given(loads(reading=True))
def test_extractions_end_with_the_states_of_their_own_sequence(load: Load) -> None:
    drive = Drive(load)
    drive.run()
    check_results(drive)


@given(loads(reading=True, restarting=True, rooted=True))
def test_extractions_begin_again_in_a_new_engine(load: Load) -> None:
    drive = Drive(load)
    drive.run()
    check_results(drive)


def check_results(drive: Drive) -> None:
    for request in drive.accepted.values():
        if request.extraction is not None:
            check_states(request, request.extraction, drive.received[request.request_id, 0])
            continue
        if request.pooling_params is not None:
            check_vector(request, drive.received[request.request_id, 0])
            continue
        if request.beam_params is not None:
            check_texts(request, request.beam_params, drive)
            continue
        for choice in range(request.sampling_params.n):
            check_choice(request, choice, drive.received[request.request_id, choice], drive.load.max_model_len)
    drive.scheduler.leases.end_all()
    drive.scheduler.check()
    assert drive.scheduler.kv_cache.usage == 0.0
    assert not drive.runner.rows, "rows that nobody told the runner to drop"
    assert drive.scheduler.reset_prefix_cache()


def check_choice(request: EngineCoreRequest, choice: int, received: Received, max_model_len: int) -> None:
    params = request.sampling_params
    prompt = request.prompt_token_ids
    max_total = min(len(prompt) + (params.max_tokens or max_model_len), max_model_len)
    seed = branch_seed(params.seed, request.request_id, choice)
    expected = reference_tokens(prompt, params, seed, max_total, VOCABULARY)
    assert received.pooled is None
    if received.finish in (FinishReason.ABORT, FinishReason.ERROR):
        assert received.tokens == expected[: len(received.tokens)]
        return
    assert received.tokens == expected
    assert received.num_logprobs == (0 if params.logprobs is None else len(expected))
    stopped = expected[-1] in params.all_stop_token_ids
    assert received.finish == (FinishReason.STOP if stopped else FinishReason.LENGTH)
    wanted = range(1, len(prompt)) if params.prompt_logprobs is not None and choice == 0 else []
    assert received.prompt_positions == list(wanted)


def check_texts(request: EngineCoreRequest, params: BeamSearchParams, drive: Drive) -> None:
    received = [drive.received[request.request_id, choice] for choice in range(params.n)]
    if received[0].finish in (FinishReason.ABORT, FinishReason.ERROR):
        assert len({choice.finish for choice in received}) == 1
        return
    event(f"beams: early stopping {params.early_stopping}")
    prompt = request.prompt_token_ids
    max_total = min(len(prompt) + params.max_tokens, drive.load.max_model_len)
    expected = reference_texts(prompt, params, max_total, VOCABULARY)
    assert [(choice.tokens, choice.score, choice.finish) for choice in received] == [
        (text.token_ids, text.score, text.finish_reason) for text in expected
    ]


def check_vector(request: EngineCoreRequest, received: Received) -> None:
    assert received.tokens == []
    if received.finish in (FinishReason.ABORT, FinishReason.ERROR):
        assert received.pooled is None
        return
    event(f"pooled: {request.pooling_params.pooling}")
    assert received.finish == FinishReason.STOP
    assert received.pooled == reference_vector(request.prompt_token_ids, request.pooling_params)


def check_states(request: EngineCoreRequest, extraction: Extraction, received: Received) -> None:
    assert received.tokens == []
    expected = rows_of(reference_states(request.prompt_token_ids, extraction))
    if received.finish in (FinishReason.ABORT, FinishReason.ERROR):
        assert received.rows == expected[: len(received.rows)] and len(received.rows) < len(expected)
        return
    event("read out")
    assert received.finish == FinishReason.STOP
    assert received.rows == expected
