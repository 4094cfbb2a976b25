"""Extraction of hidden states: rows of a sequence are run and read out, and nothing is sampled.

Extractions have a separate queue. Generation goes first; an extraction that was overtaken too often gets a share of the
step. The state of one, and the order, are in extraction.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ratoon.core.errors import DeadlineError, RequestError
from ratoon.core.media import end_of_image
from ratoon.core.messages import Fault
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import MAX_CAPTURE_SPANS, CaptureStep, EncoderStep, SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, Extraction, FinishReason, InheritedFrom
from ratoon.memory.sequence import TokenSequence
from ratoon.scheduling.branch import Branch, BranchStatus, Request
from ratoon.scheduling.extraction import AGED_SHARE, ExtractionQueue, ExtractionTask, Span
from ratoon.scheduling.kinds.interface import RequestKind
from ratoon.scheduling.preemption import Preemption
from ratoon.scheduling.shared_prefills import Admission, SharedPrefills
from ratoon.scheduling.shares import Owner
from ratoon.scheduling.state import SchedulerState
from ratoon.scheduling.step_draft import StepDraft


@dataclass(slots=True)
class PlannedCapture:
    """The rows of one extraction in a step."""

    task: ExtractionTask
    spans: list[Span]
    state: SchedulerState

    @property
    def branch(self) -> Branch:
        return self.task.branch

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count, _ in self.spans)

    def write(self, plan: SchedulerOutput) -> None:
        state, branch = self.state, self.task.branch
        if branch.request.traced:
            state.events.chunk(branch, self.num_tokens, plan.step, state.now)
        plan.captures.append(self.task.take_step(self.spans, state.kv_cache.block_ids(branch)))
        branch.num_computed_tokens += sum(count for _, count, is_written in self.spans if is_written)
        if state.shares.contended:
            state.shares.charge(self.task.owner, self.num_tokens)


@dataclass(slots=True)
class SharedRows:
    """An extraction that reads rows which its parent, a branch that runs, computes in this step for itself. It needs no
    memory and begins with the plan: until then the parent may leave the step."""

    task: ExtractionTask
    parent: Branch
    first: int  # position of the parent's first row
    begin: Callable[[ExtractionTask], None]
    num_tokens: int = 0

    @property
    def branch(self) -> Branch:
        return self.task.branch

    def write(self, plan: SchedulerOutput) -> None:
        if self.parent.branch_id in plan.num_scheduled_tokens:
            self.begin(self.task)
            plan.captures.append(self.task.take_rows(self.parent.branch_id, self.first))


@dataclass(slots=True)
class PlannedReading:
    """An encoder input that runs to be read out."""

    task: ExtractionTask
    num_tokens: int = 0  # no decoder tokens

    @property
    def branch(self) -> Branch:
        return self.task.branch

    def write(self, plan: SchedulerOutput) -> None:
        plan.encoder_steps.append(self.task.take_encoder_step())


class ExtractionKind(RequestKind):
    params_type = Extraction
    task_type = ExtractionTask
    plans_rows = True
    generates = False

    def __init__(self, state: SchedulerState, beginnings: SharedPrefills, preemption: Preemption) -> None:
        super().__init__(state, beginnings, preemption)
        self.queue = ExtractionQueue()
        # The tokens of a step reserved for an extraction that waited too long
        self._share_of_aged = max(1, state.config.token_budget // AGED_SHARE)
        preemption.free_first.append(self._preempt_last)
        state.readings.start = self._read_ended

    # ---- admission ----

    def verify_own(self, request: EngineCoreRequest) -> None:
        extraction, num_prompt_tokens = request.params, len(request.prompt_token_ids)
        assert isinstance(extraction, Extraction)
        positions = extraction.positions
        if not positions or positions != sorted(set(positions)) or positions[0] < 0:
            raise RequestError("positions", "are not rising numbers from 0 on", "at least one position, each once")
        last = f"end with {positions[-1]}"
        if extraction.of_encoder:
            if request.encoder_input is None or positions[-1] >= request.encoder_input.num_positions:
                raise RequestError("positions", last, "positions of the encoder input")
        elif positions[-1] >= num_prompt_tokens or (
            end_of_image(request.mm_features, positions[-1] + 1) != num_prompt_tokens
            and not self._state.config.whole_prompts
        ):
            raise RequestError("positions", last, "a prompt that ends with the last position")
        if not extraction.layers:
            raise RequestError("layers", "is empty", "at least one layer")
        if extraction.cross_heads and (
            request.encoder_input is None or len(extraction.cross_heads) != len(extraction.layers)
        ):
            raise RequestError("cross_heads", "do not fit the request", "an encoder input, and a layer for each head")

    def open(self, request: EngineCoreRequest, sequence_number: int) -> Request:
        assert isinstance(request.params, Extraction)
        opened = Request(
            request,
            sequence_number,
            self.max_total_tokens(request),
            whole_images=self._state.config.whole_images,
        )
        opened.task = ExtractionTask(opened.branches[0], request.params, self.queue, self._state.now)
        return opened

    def enqueue(self, request: Request) -> None:
        self.queue.add(_task_of(request.branches[0]))

    def enqueue_again(self, branch: Branch) -> None:
        """`ExtractionTask.reclaim` has already queued it."""

    def _read_ended(self, request: EngineCoreRequest, sequence_number: int, ended: TokenSequence) -> None:
        """Extract from a sequence that ends now, over its blocks. Without those that are needed it waits, and finds
        them in the prefix cache or computes them again."""
        opened, state = self.open(request, sequence_number), self._state
        (branch,) = opened.branches
        task = _task_of(branch)
        holds_adapter = state.adapters.enter(opened, lambda: self.queue.add_reading(task), state.now, at_once=True)
        state.add(opened)
        if not holds_adapter:
            return
        self.queue.add_reading(task)
        num_inherited = state.kv_cache.inherit_blocks_from_parent(ended, branch, self._most_to_share(task), num_left=0)
        if num_inherited:
            branch.num_cached_tokens = num_inherited
            state.inherited[opened.request_id] = InheritedFrom.LEASE
            self._run(task)
            state.events.scheduled(branch, state.now)

    # ---- a step is planned ----

    def wanted_tokens(self) -> Iterable[tuple[Owner, int]]:
        return [(task.owner, task.num_rows_left) for task in self.queue if not task.is_in_flight]

    def held_back(self, step: StepDraft) -> tuple[Owner, int] | None:
        """What prompts leave to one that waited too long: not everything, because it may wait for their memory. Of a
        single token, every other one."""
        aged = self.queue.aged
        if aged is None:
            return None
        room = step.room(aged.owner)
        most = room - 1 if room > 1 or step.shares is None else room * (aged.num_passed_by % 2)
        share = max(self._share_of_aged, self._state.media.least_tokens(aged.branch))
        return aged.owner, min(max(most, 0), share)

    def plan_early(self, step: StepDraft) -> bool:
        """One that was overtaken too often gets its share before waiting branches."""
        aged = self.queue.aged
        if aged is None or aged.is_in_flight or not step.has_room(aged.owner):
            return True
        takes_all = self._state.config.whole_prompts or not self._state.waiting
        if self._extract(step, aged, step.budget if takes_all else self._share_of_aged):
            return True
        self._extract_inside_images(step)
        return False

    def plan_late(self, step: StepDraft) -> None:
        """Running extractions, then waiting ones, while there is room."""
        if not self.queue:
            return
        planned = {planned.branch for planned in _planned(step)}
        for task in list(self.queue):
            if task.is_in_flight or task.branch in planned:
                continue
            if self._share_rows(step, task):
                continue
            if not self._extract(step, task, step.budget) and step.has_room(task.owner):
                return self._extract_inside_images(step)

    def _extract_inside_images(self, step: StepDraft) -> None:
        """The first extraction does not fit. Those behind it that are in the middle of an image hold outputs of the
        encoder, for which it may wait: they go on to the image's end."""
        planned = {planned.branch for planned in _planned(step)}
        for task in self.queue.running.copy():
            is_left = not task.is_in_flight and task.branch not in planned
            if is_left and self._state.media.cache.keys_held_by(task.branch):
                self._extract(step, task, step.budget)

    def close(self, step: StepDraft) -> None:
        first = self.queue.first
        if first is not None and not first.is_in_flight and not _planned(step):
            first.num_passed_by += 1

    def preempt_others(self, request: Request) -> None:
        while self._state.readings.free_one():
            pass
        for task in reversed(self.queue.running.copy()):
            if task.branch.request is not request:
                self._state.reclaim(task.branch)

    def plan_alone(self, step: StepDraft, request: Request) -> bool:
        while not self._extract(step, _task_of(request.branches[0]), step.budget):
            if not self._preemption.preempt_another(step, request):
                break
        return True

    def _preempt_last(self) -> bool:
        """A branch needs memory: preempt the extraction that began last, unless it waited too long."""
        running = self.queue.running
        if not running or running[-1] is self.queue.aged:
            return False
        self._state.reclaim(running[-1].branch)
        return True

    def _extract(self, step: StepDraft, task: ExtractionTask, most: int) -> bool:
        """Give an extraction `most` rows, and memory for those that are written. False: there is no room for it."""
        if task.extraction.of_encoder:
            return self._read_encoder(step, task)
        branch = task.branch
        budget = min(most, step.room(task.owner), self._state.max_step_tokens)
        max_spans = MAX_CAPTURE_SPANS - sum(
            len(planned.spans) for planned in _planned(step) if isinstance(planned, PlannedCapture)
        )
        if budget <= 0 or max_spans <= 0:
            return False
        begins, num_encoder_inputs = branch.status != BranchStatus.RUNNING, len(step.encoder_lengths)
        if begins and not self._begin(step, task):
            return False
        spans = task.next_spans(branch.num_computed_tokens, budget, max_spans)
        if branch.media_end and not (spans := self._fit_media(step, branch, spans)):
            if begins:
                self._state.reclaim(branch)
                del step.encoder_lengths[num_encoder_inputs:]
            return False
        num_written = sum(count for _, count, is_written in spans if is_written)
        if self._state.config.whole_prompts and num_written < branch.num_tokens:
            self._state.reclaim(branch)
            return False
        while num_written and self._state.kv_cache.allocate_slots(branch, num_written) is None:
            if not self._make_room(step, task):
                # The aged one keeps its blocks and waits for the rest, except blocks that only this step writes: it is
                # not part of the step, and would not learn of its failure.
                if begins or task is not self.queue.aged:
                    self._state.reclaim(branch)
                    del step.encoder_lengths[num_encoder_inputs:]
                self._state.media.settle(branch)
                return False
        if begins:
            self._state.events.scheduled(branch, self._state.now)
        step.add_rows(PlannedCapture(task, spans, self._state))
        return True

    def _fit_media(self, step: StepDraft, branch: Branch, spans: list[Span]) -> list[Span]:
        """The spans, as far as the images that they read are there, or run in this step."""
        most = min(step.budget, self._state.max_step_tokens)
        fitting = self._state.media.fit_spans(branch, spans, most)
        if not fitting:
            self._state.media.settle(branch)
        return fitting

    def _share_rows(self, step: StepDraft, task: ExtractionTask) -> bool:
        """Let an extraction that has not begun read rows of its parent, if the step computes all of them: all branches
        of the step are planned. One of each parent, so that a step reads no more rows than it has."""
        branch, positions = task.branch, task.extraction.positions
        parent = self._state.branches.get(branch.request.continuation_of or "")
        if parent is None or branch.status == BranchStatus.RUNNING or task.num_captured:
            return False
        rows = step.rows_of(parent)
        if positions[0] not in rows or positions[-1] not in rows:
            return False
        if any(isinstance(planned, SharedRows) and planned.parent is parent for planned in step.rows):
            return False
        step.add_rows(SharedRows(task, parent, rows.start, self._begin_in_rows))
        return True

    def _begin_in_rows(self, task: ExtractionTask) -> None:
        branch = task.branch
        if branch.status == BranchStatus.WAITING:
            branch.num_cached_tokens = branch.num_tokens
            self._beginnings.note_inheritance(branch, branch.num_tokens)
        self._run(task)
        self._state.events.scheduled(branch, self._state.now)

    def _read_encoder(self, step: StepDraft, task: ExtractionTask) -> bool:
        """Encoder states are not cached: the encoder runs on the whole input, and needs no blocks."""
        branch, encoder_input = task.branch, task.branch.request.encoder_input
        assert encoder_input is not None
        if not step.fits_encoder(encoder_input.num_positions):
            return False
        if branch.status != BranchStatus.RUNNING:
            self._run(task)
            self._state.events.scheduled(branch, self._state.now)
        step.encoder_lengths.append(encoder_input.num_positions)
        step.add_rows(PlannedReading(task))
        return True

    def _begin(self, step: StepDraft, task: ExtractionTask) -> bool:
        """Share the cached blocks of its sequence."""
        state, branch = self._state, task.branch
        num_settled = most = self._most_to_share(task)
        parent = state.branches.get(branch.request.continuation_of or "")
        if parent is not None:  # it runs, and may write to its last block in this step
            num_full_blocks = parent.num_computed_tokens // state.kv_cache.block_size
            num_settled = min(most, num_full_blocks * state.kv_cache.block_size)
        num_inherited = self._beginnings.inherit(branch, num_settled, num_left=0)
        while (found := self._beginnings.attach_cross(step, branch, may_load=False)) == Admission.NO_MEMORY:
            if not self._make_room(step, task):
                break
        if found != Admission.ADMITTED or state.kv_cache.is_arriving(branch):
            state.kv_cache.free(branch)
            return False
        if not num_inherited:
            hit_blocks, num_hit_tokens = state.kv_cache.get_computed_blocks(branch, most)
            state.kv_cache.allocate_slots(branch, 0, hit_blocks, num_hit_tokens)
            branch.num_computed_tokens = num_hit_tokens
        if branch.status == BranchStatus.WAITING:
            branch.num_cached_tokens = branch.num_computed_tokens
            self._beginnings.note_inheritance(branch, num_inherited)
        self._run(task)
        return True

    def _most_to_share(self, task: ExtractionTask) -> int:
        """Tokens whose blocks are shared: all, unless a window has freed some that rows read."""
        return task.next_position if self._state.kv_cache.gives_blocks_back else task.branch.num_tokens

    def _run(self, task: ExtractionTask) -> None:
        task.branch.status = BranchStatus.RUNNING
        task.branch.first_step = self._state.next_step
        self.queue.begin(task)

    def _make_room(self, step: StepDraft, task: ExtractionTask) -> bool:
        """Preempt extractions that began later, so that the first always makes progress; take the blocks of branches
        that were loaded, and evict leases, if it waited too long or is alone. With steps in flight nothing is
        preempted."""
        if not self._state.may_take_memory:
            self._state.wants_drain = True
            return False
        if self._state.readings.free_one():
            return True
        running = self.queue.running
        last = running[-1] if running else task
        is_planned = any(planned.task is last for planned in _planned(step))
        if last is not task and task in running and not is_planned:
            self._state.reclaim(last.branch)
            return True
        goes_first = task is self.queue.aged or step.is_empty
        return goes_first and (self._state.loads.free_one() or self._state.leases.evict_one())

    # ---- results ----

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Rows read out are sent at once, part by part. Rows that were only computed yield no output."""
        if not plan.captures and not plan.encoder_steps:
            return []
        outputs: list[EngineCoreOutput] = []
        captures: list[CaptureStep | EncoderStep] = [*plan.captures]
        captures += [step for step in plan.encoder_steps if step.captured]
        for capture in captures:
            branch = self._state.branches.get(capture.req_id)
            task = None if branch is None else branch.request.task
            if branch is None or not isinstance(task, ExtractionTask) or branch.first_step > plan.step:
                continue
            states = output.hidden_states.get(capture.req_id)
            if states is None and capture.captured:
                outputs += self._state.fail_requests([capture.req_id], "the runner returned no hidden states")
                continue
            first_row = task.num_captured
            task.confirm(capture)
            self._state.quarantined.pop(branch.request_id, None)
            if states is None:
                continue
            outputs.append(
                EngineCoreOutput(
                    branch.request_id,
                    [],
                    finish_reason=FinishReason.STOP if task.done else None,
                    num_cached_tokens=branch.num_cached_tokens,
                    hidden_states=states,
                    first_row=first_row,
                    num_rows_run=task.num_rows_run,
                )
            )
            if task.done:
                self._state.release([branch])
        return outputs

    # ---- time, and checks ----

    def end_overdue(self) -> list[EngineCoreOutput]:
        outputs = []
        now = self._state.now
        for task in [task for task in self._unfinished() if task.deadline is not None and task.deadline <= now]:
            problem = (
                f"its {task.extraction.deadline:g} s are over, with {task.num_captured} of "
                f"{len(task.extraction.positions)} positions done"
            )
            refusal = Fault(DeadlineError.__name__, "deadline", problem, "more time, or fewer positions")
            outputs += self._state.end_requests(
                [task.branch.request], FinishReason.ERROR, f"deadline: {problem}", trusted=True, refusal=refusal
            )
        return outputs

    def next_deadline(self) -> float | None:
        return min((task.deadline for task in self._unfinished() if task.deadline is not None), default=None)

    def _unfinished(self) -> list[ExtractionTask]:
        """All extractions, those that wait for adapters too."""
        at_gate = [request.task for request in self._state.adapters.waiting()]
        return [*self.queue, *(task for task in at_gate if isinstance(task, ExtractionTask))]

    def queued(self) -> tuple[Sequence[Branch], Sequence[Branch]]:
        return [task.branch for task in self.queue.running], [task.branch for task in self.queue.waiting]


def _task_of(branch: Branch) -> ExtractionTask:
    task = branch.request.task
    assert isinstance(task, ExtractionTask)
    return task


def _planned(step: StepDraft) -> list[PlannedCapture | PlannedReading | SharedRows]:
    return [rows for rows in step.rows if isinstance(rows, (PlannedCapture, PlannedReading, SharedRows))]
