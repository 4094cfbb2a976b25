"""Runs a load through a scheduler, its memory and a runner that notices every wrong slot, checking as it goes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import event

from ratoon.core.config import CacheConfig
from ratoon.core.errors import RequestError
from ratoon.core.media import cut_features, end_of_image, feature_around
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.core.plan import MAX_CAPTURE_SPANS, SchedulerOutput
from ratoon.core.readings import asks_for_states, awaits_count, reading_id, reading_of
from ratoon.core.request import (
    EngineCoreOutput,
    EngineCoreRequest,
    Extraction,
    FinishReason,
    ResumedChoice,
    branch_id_of,
)
from ratoon.core.speculation import SpeculationConfig
from ratoon.core.wire import Decoder, WireTensor, encode
from ratoon.scheduling.branch import Branch
from ratoon.scheduling.drafters.device import DeviceDrafter
from ratoon.scheduling.drafters.interface import Drafter
from ratoon.scheduling.scheduler import Scheduler
from ratoon.scheduling.speculation import Speculation
from tests.property.adapters import FakeAdapters
from tests.property.extractions import Reading, rows_of
from tests.property.fake_runner import FakeRunner, Row
from tests.property.loads import VOCABULARY, Child, Load
from tests.property.media import FakeMedia
from tests.property.references import extend_prefix, next_token
from tests.property.watches import EncoderWatch, SwapWatch

MAX_STEPS = 3000


@dataclass
class Received:
    tokens: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    prompt_positions: list[int] = field(default_factory=list)
    pooled: WireTensor | None = None
    rows: list[list[int]] = field(default_factory=list)  # of an extraction, each with a number for every layer
    finish: FinishReason | None = None
    score: float | None = None


@dataclass
class Untold:
    """A text that ended in the engine, and in which the front end still looks for stop strings."""

    request: EngineCoreRequest
    choice: int
    step: int  # when it tells how many tokens count
    is_lost: bool = False  # the engine has died since


def guesses(runner: FakeRunner, row: Row, num_tokens: int, count: int, number: int) -> list[int]:
    """Guesses at the tokens of a row behind its first `num_tokens`, some of them wrong, by the bits of `number`."""
    prefix, num_output = row.prefixes[num_tokens - 1], num_tokens - row.num_prompt_tokens
    tokens: list[int] = []
    for place in range(count):
        token = next_token(prefix, row.seed, num_output + place, row.params, runner.vocabulary)
        tokens.append(token if number >> place & 3 else (token + 1) % runner.vocabulary)
        prefix = extend_prefix(prefix, token)
    return tokens


class GuessingSource:
    """A source of drafts that are right, wrong or none, by the text."""

    def __init__(self, runner: FakeRunner, number: int) -> None:
        self.name = f"guesses {number}"
        self._runner = runner
        self._number = number
        self._known: set[Branch] = set()

    def propose(self, branch: Branch, max_tokens: int) -> list[int]:
        self._known.add(branch)
        row = self._runner.rows.get(branch.branch_id)
        if row is None or len(row.prefixes) < branch.num_tokens:
            return []
        number = hash((row.prefixes[branch.num_tokens - 1], 17, self._number))
        if number % 3 == 0:
            return []
        event("a source has a draft" + (" behind a pending token" if branch.num_pending else ""))
        return guesses(self._runner, row, branch.num_tokens, 1 + number % max_tokens, number)

    def num_matched(self, branch: Branch) -> int:
        return 0

    def drop(self, branch: Branch) -> None:
        self._known.discard(branch)


class Drive:
    """Runs one load to its end, checking as it goes."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.accepted: dict[str, EngineCoreRequest] = {}
        self.received: dict[tuple[str, int], Received] = defaultdict(Received)
        self.num_texts: dict[str, int] = {}  # of searches that found fewer than they were asked for
        self.untold: dict[str, Untold] = {}  # by the id of the branch
        self.now = 0
        self.start()

    def start(self) -> None:
        load = self.load
        self.scheduler = Scheduler(
            load.scheduler,
            CacheConfig(
                enable_prefix_caching=load.caching,
                lease_fraction=load.lease_fraction,
                encoder_cache_size=load.encoder_cache_size,
            ),
            load.kv,
            load.max_model_len,
            load.swap_costs,
            num_adapter_slots=load.num_adapter_slots,
        )
        adapters = FakeAdapters(load.num_adapter_slots, load.adapter_slowness, load.broken_adapters)
        config = load.scheduler
        media = FakeMedia(load.encoder_cache_size, config.max_num_encoder_tokens, not config.whole_images)
        self.runner = FakeRunner(
            load.kv, self.accepted, VOCABULARY, load.burst, load.lateness, load.lost_slots, adapters, media
        )
        self.in_flight: list[tuple[SchedulerOutput, SchedulerOutput, bool]] = []  # plan, as decoded, is one quarantined
        if load.num_guesses and load.num_sources:
            state = self.scheduler.state
            sources: list[Drafter] = [GuessingSource(self.runner, number) for number in range(load.num_sources)]
            if load.drafts_on_device:
                sources[-1] = DeviceDrafter("device")
            config = SpeculationConfig(num_tokens=load.num_guesses, max_seqs=load.scheduler.max_num_seqs)
            state.speculation = Speculation(config, sources, state.pace, load.scheduler.max_num_seqs)
        self.swaps = SwapWatch(self.scheduler)
        self.encoder = EncoderWatch(self.scheduler, self.accepted, load.scheduler.max_num_encoder_tokens)

    def restart(self) -> None:
        """Everything but what callers have received is lost: a new engine resumes from there."""
        self.start()
        for untold in self.untold.values():
            untold.is_lost = True
        for request in self.accepted.values():
            choices = [self.received[request.request_id, choice] for choice in range(self.num_choices(request))]
            if all(received.finish is not None for received in choices):
                continue
            choices[0].rows.clear()  # hidden states come from the beginning again,
            if not choices[0].tokens:
                choices[0].prompt_positions.clear()  # and so do log-probabilities of a prompt
            if isinstance(request.params, SamplingParams) and any(received.tokens for received in choices):
                event("resumed")
                resumed = [ResumedChoice(received.tokens.copy(), received.finish is not None) for received in choices]
                request = msgspec.structs.replace(request, resumed=resumed)
            self.add_again(request)
            self.scheduler.check()

    def num_choices(self, request: EngineCoreRequest) -> int:
        return self.num_texts.get(request.request_id, request.num_choices)

    def add_again(self, request: EngineCoreRequest) -> None:
        try:
            self.scheduler.add_request(request)
        except RequestError:
            assert request.request_id.endswith(".states"), "what was accepted once is accepted again"
            self.received[request.request_id, 0].finish = FinishReason.ERROR

    def run(self) -> None:
        later = [*self.load.children, *self.load.readings]
        last_arrival = max([*self.load.arrivals, *(one.step for one in later)])
        for step in range(MAX_STEPS):
            self.now = step
            if step in self.load.restarts:
                self.restart()
            self.front_end_finds_stops(step)
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
            self.abort(self.load.aborts.get(step, []))
            if step > last_arrival and not (self.scheduler.has_requests() or self.in_flight or self.untold):
                return
            self.step(step)
            self.scheduler.check()
        raise AssertionError(f"not done after {MAX_STEPS} steps: {self.scheduler.stats()}")

    def abort(self, ids: list[str]) -> None:
        for branch_id, untold in list(self.untold.items()):
            if untold.request.request_id in ids or reading_id(branch_id) in ids:
                event("a text that waits to be read is aborted")
                del self.untold[branch_id]
        self.take(self.scheduler.abort_requests(ids))

    def front_end_finds_stops(self, step: int) -> None:
        for branch_id in self.load.stops.get(step, []):
            request_id, _, choice = branch_id.partition("#")
            request, number = self.accepted.get(request_id), int(choice or 0)
            received = self.received[request_id, number]
            if request is None or not isinstance(request.params, SamplingParams) or number >= request.num_choices:
                continue
            if received.tokens and received.finish is None:
                event("a stop string")
                self.tell(request, number)
                self.scheduler.check()
        for branch_id, untold in list(self.untold.items()):
            if untold.step <= step:
                del self.untold[branch_id]
                self.tell(untold.request, untold.choice, untold.is_lost)
                self.scheduler.check()

    def tell(self, request: EngineCoreRequest, choice: int, is_lost: bool = False) -> None:
        """A text ended at a stop string, or has none: so many of its tokens count."""
        received = self.received[request.request_id, choice]
        num_tokens = max(1, len(received.tokens) - self.load.num_cut)
        reading = None
        if asks_for_states(request):
            reading = reading_of(request, choice, received.tokens[:num_tokens])
        if is_lost:
            if reading is not None:
                event("read by another engine")
                self.accepted[reading.request_id] = reading
                self.add_again(reading)
            return
        stopped = {branch_id_of(request.request_id, choice): num_tokens if asks_for_states(request) else None}
        outputs = self.scheduler.stop_requests(stopped) + self.scheduler.stop_requests(stopped)  # it may come twice
        if reading is not None:
            self.accepted[reading.request_id] = reading
            assert reading.request_id in self.scheduler.state.requests
        self.take([output for output in outputs if output.request_id in self.accepted])

    def text_ended(self, request: EngineCoreRequest, choice: int) -> None:
        if awaits_count(request.params):
            name = branch_id_of(request.request_id, choice)
            self.untold[name] = Untold(request, choice, self.now + self.load.seconds_to_tell)
            return
        reading = reading_of(request, choice, self.received[request.request_id, choice].tokens)
        if reading is not None:
            event("a text is read")
            self.accepted[reading.request_id] = reading

    def owner_of(self, request: EngineCoreRequest) -> str | None:
        parent = self.accepted.get((request.continuation_of or "").partition("#")[0])
        number = sum(map(ord, request.request_id))
        return self.load.owners[number % len(self.load.owners)] if parent is None else parent.owner

    def arrive(self, request: EngineCoreRequest) -> None:
        request = msgspec.structs.replace(request, owner=self.owner_of(request))
        try:
            self.scheduler.add_request(request)
        except RequestError as error:
            event(f"refused: {error.field}")
            return
        self.accepted[request.request_id] = request

    def arrive_child(self, name: str, child: Child) -> None:
        parent = self.accepted.get(f"r{child.parent}")
        if parent is None or parent.generation_params is None or child.choice >= parent.num_choices:
            return
        received = self.received[parent.request_id, child.choice]
        if received.finish in (FinishReason.ABORT, FinishReason.ERROR):
            return
        if isinstance(parent.params, BeamSearchParams) and received.finish is None:
            return
        tokens = parent.prompt_token_ids + received.tokens
        tokens = tokens[: max(1, len(tokens) - child.num_left_out)]
        if self.load.scheduler.whole_images and feature_around(parent.mm_features, len(tokens)) is not None:
            return  # which the front end refuses
        kind = "a beam search" if isinstance(parent.params, BeamSearchParams) else "a parent"
        event(f"continuation of {kind} that " + ("runs" if received.finish is None else "has ended"))
        self.arrive(
            EngineCoreRequest(
                name,
                tokens + child.suffix,
                child.params,
                arrival_time=100.0 + child.step,
                cache_salt=parent.cache_salt,
                adapter=parent.adapter,
                encoder_input=parent.encoder_input,
                mm_features=cut_features(parent.mm_features, len(tokens)),
                continuation_of=branch_id_of(parent.request_id, child.choice),
                continuation_token_ids=child.suffix,
                retain_kv=child.retain_kv,
                session=parent.session or parent.request_id,
                is_branch=child.num_left_out > 1,
                retention=parent.retention,
            )
        )

    def arrive_reading(self, name: str, reading: Reading) -> None:
        if reading.parent is None:
            event("extraction of a prompt of its own")
            self.arrive(reading.request(name, reading.prompt, reading.salt, reading.encoder_input, None))
            return
        parent = self.accepted.get(f"r{reading.parent}")
        if parent is None or reading.choice >= self.num_choices(parent):
            return
        received = self.received[parent.request_id, reading.choice]
        tokens = [
            *parent.prompt_token_ids,
            *([] if isinstance(parent.params, BeamSearchParams) and received.finish is None else received.tokens),
        ]
        event("extraction of a parent that " + ("runs" if received.finish is None else "has ended"))
        branch_id = branch_id_of(parent.request_id, reading.choice)
        request = reading.request(name, tokens, parent.cache_salt, parent.encoder_input, branch_id)
        num_tokens = len(request.prompt_token_ids)
        if self.load.scheduler.whole_images:
            num_tokens = end_of_image(parent.mm_features, num_tokens)
            request.prompt_token_ids = tokens[:num_tokens]
        request.mm_features = cut_features(parent.mm_features, num_tokens)
        request.adapter = parent.adapter
        self.arrive(request)

    def plan_steps(self) -> None:
        """As many as may be in flight."""
        while len(self.in_flight) < self.load.scheduler.num_in_flight and self.scheduler.can_plan:
            quarantined = bool(self.scheduler.state.quarantined)  # then others are preempted for it
            self.swaps.before_plan()
            if self.load.num_guesses and not self.load.num_sources:
                self.guess()
            plan = self.scheduler.schedule()
            self.scheduler.check()
            self.swaps.after_plan(plan)
            self.encoder.after_plan(plan)
            decoded = Decoder(SchedulerOutput).decode(encode(plan))
            assert decoded == plan
            self.check_limits(plan)
            if plan.is_void:
                return
            if self.in_flight:
                event("planned ahead")
            self.in_flight.append((plan, decoded, quarantined))
            self.runner.adapters.announce(decoded.adapter_loads)

    def guess(self) -> None:
        """Guess next tokens of some branches, some of them wrongly."""
        for branch in self.scheduler.state.running:
            row = self.runner.rows.get(branch.branch_id)
            if row is None or hash(branch.request_id) % 3 == 0 or not isinstance(row.params, SamplingParams):
                continue
            branch.plans_ahead = False  # guesses are made behind known tokens
            if branch.num_pending or branch.num_computed_tokens != branch.num_tokens - 1:
                continue
            number = hash((row.prefixes[-1], 11))
            branch.propose(guesses(self.runner, row, branch.num_tokens, 1 + number % self.load.num_guesses, number))

    def draft_behind(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Guesses of the device behind a step, as many as the plan asks for, or fewer."""
        for branch_id, length in plan.draft_lengths.items():
            if branch_id in result.req_ids:
                event("drafts of the device")
                row = self.runner.rows[branch_id]
                number = hash((row.prefixes[-1], 23))
                count = number % (length + 1)
                result.draft_token_ids[branch_id] = guesses(self.runner, row, len(row.token_ids), count, number)

    def step(self, step: int) -> None:
        self.plan_steps()
        if not self.in_flight:
            return
        plan, decoded, quarantined = self.in_flight.pop(0)
        if step in self.load.raising_steps:
            self.runner.fail(decoded, self.held_elsewhere(plan), self.load.raises_late)
            for _, skipped, _ in self.in_flight:
                event("skipped")
                self.runner.fail(skipped, set(), begun=False)
            self.in_flight.clear()
            self.take(self.scheduler.step_failed(plan, "the device is on fire"))
            self.encoder.look_for_losses()
            return
        result = self.runner.execute(decoded)
        self.draft_behind(decoded, result)
        if not self.load.aborts_before_done:
            self.scheduler.step_done(plan)
        self.abort(self.load.mid_step_aborts.get(step, []))
        if step in self.load.bad_rows and (result.req_ids or self.other_values(result)):
            self.drop_row(result)
        self.take(self.scheduler.update_from_output(plan, result))
        if plan.preempted_req_ids and len(set(self.load.owners)) > 1:
            event("preempted, perhaps for another owner")
            resumed = set(plan.preempted_req_ids) & {new.req_id for new in plan.scheduled_new_reqs}
            # A request that runs alone may move memory between its choices
            assert quarantined or not resumed, f"preempted and resumed in one step: {resumed}"
        elif plan.preempted_req_ids and not quarantined:
            event("preempted")
            from_nothing = [new for new in plan.scheduled_new_reqs if new.num_computed_tokens == 0]
            assert not from_nothing, "admitted while preempting"
        if plan.block_copies:
            event("copied on write")
        for branch_id, drafts in plan.scheduled_spec_decode_tokens.items():
            kept = dict(zip(result.req_ids, result.sampled_token_ids)).get(branch_id, [])
            event("all guesses kept" if len(kept) > len(drafts) else "guesses taken back")
        for beam_step in plan.beam_steps:
            event("beams that catch up" if beam_step.num_tokens > 1 else "beams")

    def held_elsewhere(self, plan: SchedulerOutput) -> set[int]:
        """Blocks not held by running branches: by leases, by texts that wait to be read, and by branches left out of
        the step, choices included that the runner has not heard of yet."""
        idle = [branch for name, branch in self.scheduler.state.branches.items() if name not in plan.req_ids]
        holders = [*self.scheduler.leases.sequences(), *self.scheduler.state.readings.held(), *idle]
        tables = [table for holder in holders for table in holder.block_tables]
        tables += [holder.cross.blocks for holder in holders if holder.cross is not None]
        return {block.block_id for table in tables for block in table}

    def other_values(self, result: ModelRunnerOutput) -> dict[str, Any]:
        """Results other than tokens."""
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
        self.runner.media.check_budget(plan, not config.enable_chunked_prefill)
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
            is_run = 0 < len(capture.token_ids) <= self.scheduler.state.max_step_tokens
            assert is_run != (capture.branch_id in plan.num_scheduled_tokens)
        loads = plan.loads or plan.awaits_loads or self.scheduler.state.adapters.awaits_load
        if plan.is_empty and not loads and not self.in_flight:
            assert not self.scheduler.has_unfinished_requests(), "nothing runs although something waits"

    def take(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            received = self.received[output.request_id, output.choice]
            assert received.finish is None, "an output after the end"
            request = self.accepted[output.request_id]
            # One token is always computed, except where nothing is generated behind it.
            most_cached = len(request.prompt_token_ids) - (not isinstance(request.params, Extraction))
            assert output.num_cached_tokens <= most_cached
            if output.num_texts is not None:
                event("a search found fewer texts")
                self.num_texts[output.request_id] = output.num_texts
            received.tokens = output.new_token_ids if output.replaces else received.tokens + output.new_token_ids
            received.score = output.score
            received.finish = output.finish_reason
            if output.inherited_from is not None:
                event(f"inherited from: {output.inherited_from}")
            received.pooled = output.pooled
            if output.hidden_states is not None:
                assert output.first_row == len(received.rows), "rows are missing, or came twice"
                received.rows += rows_of(output.hidden_states)
                shares_rows = output.num_rows_run == 0  # those of a branch that ran anyway
                assert shares_rows or output.num_rows_run >= len(received.rows)
                event(f"states of rows that ran anyway: {shares_rows}")
            if output.new_logprobs is not None:
                received.num_logprobs += len(output.new_logprobs.token_ids)
            for chunk in output.prompt_logprobs or []:
                received.prompt_positions += range(chunk.start, chunk.start + len(chunk.rows.token_ids))
            if asks_for_states(request) and output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.text_ended(request, output.choice)
