"""Requests for hidden states as the scheduler sees them: which rows are still to be run, and the queue of extractions.

An extraction reads the keys and values of another sequence and runs only the rows that it was asked for. Rows whose
keys and values are cached are run without writing them; missing ones are computed like a prompt, and their rows are
read out in the same pass. The planner decides which extraction runs when.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from ratoon.core.errors import QueueFullError
from ratoon.core.plan import BlockIds, CaptureStep, EncoderStep, SchedulerOutput
from ratoon.core.request import Extraction
from ratoon.core.shares import has_room
from ratoon.scheduling.branch import Branch, BranchStatus
from ratoon.scheduling.task import Task

Span = tuple[int, int, bool]  # first position, count, whether keys and values are written

MAX_WAITING = 1024  # extractions that have not begun
PATIENCE = 16  # times that the first may be overtaken; after that no request overtakes it or takes its memory
AGED_SHARE = 8  # it then gets 1/AGED_SHARE of a step's tokens


class ExtractionTask(Task):
    """One extraction: ascending positions, the first `num_captured` of them done."""

    __slots__ = (
        "branch",
        "deadline",
        "extraction",
        "is_in_flight",
        "num_captured",
        "num_passed_by",
        "num_rows_run",
        "queue",
    )

    def __init__(self, branch: Branch, extraction: Extraction, queue: ExtractionQueue, now: float) -> None:
        self.queue = queue
        self.branch = branch
        self.extraction = extraction
        # On the scheduler's clock
        self.deadline: float | None = None if extraction.deadline is None else now + extraction.deadline
        self.is_in_flight = False  # a step of it is in flight: the next rows are known when it is done
        self.num_captured = 0
        self.num_passed_by = 0  # times that others were planned first since its last result
        self.num_rows_run = 0

    @property
    def owner(self) -> str | None:
        return self.branch.request.owner

    @property
    def done(self) -> bool:
        return self.num_captured == len(self.extraction.positions)

    @property
    def num_rows_left(self) -> int:
        """Rows that are still to be run: those to be computed, or those to be read again."""
        num_positions = len(self.extraction.positions) - self.num_captured
        return max(num_positions, self.branch.num_tokens - self.branch.num_computed_tokens)

    @property
    def next_position(self) -> int:
        return self.extraction.positions[self.num_captured]

    def next_spans(self, num_computed: int, budget: int, max_spans: int) -> list[Span]:
        """What to run next, within `budget` rows: (first position, count, whether it is written).

        Positions before `num_computed` are cached: only requested ones are run. From there on, all positions before the
        next requested one must be computed.
        """
        spans: list[Span] = []
        # For each layer of a row a lens runs the head, and weights are as many numbers: other requests wait for it.
        if self.extraction.lens or self.extraction.cross_heads:
            budget = min(budget, max(1, budget // (1 + len(self.extraction.layers))))
        positions = self.extraction.positions
        index = self.num_captured
        while index < len(positions) and positions[index] < num_computed and budget > 0:
            first = positions[index]
            count = 1
            while (
                count < budget
                and index + count < len(positions)
                and positions[index + count] == first + count < num_computed
            ):
                count += 1
            if len(spans) == max_spans:
                return spans
            spans.append((first, count, False))
            budget -= count
            index += count
        if index < len(positions) and budget > 0 and positions[index] >= num_computed and len(spans) < max_spans:
            spans.append((num_computed, min(budget, self.branch.num_tokens - num_computed), True))
        return spans

    def take_step(self, spans: list[Span], block_ids: BlockIds) -> CaptureStep:
        """The step for these spans."""
        tokens: list[int] = []
        captured: list[int] = []
        positions, index = self.extraction.positions, self.num_captured
        for first, count, _ in spans:
            while index < len(positions) and positions[index] < first + count:
                captured.append(len(tokens) + positions[index] - first)
                index += 1
            tokens += self.branch.token_ids[first : first + count]
        self.is_in_flight = True
        return CaptureStep(
            req_id=self.branch.branch_id,
            token_ids=tokens,
            spans=spans,
            block_ids=block_ids,
            captured=captured,
            layers=self.extraction.layers,
            dtype=self.extraction.dtype,
            cross_block_ids=[] if self.branch.cross is None else self.branch.cross.block_ids,
            num_encoder_positions=0 if self.branch.cross is None else self.branch.cross.num_positions,
            overrides=self.branch.request.overrides,
            adapter_slot=self.branch.request.adapter_slot,
            lens=self.extraction.lens,
            cross_heads=self.extraction.cross_heads,
        )

    def take_rows(self, branch_id: str, first: int) -> CaptureStep:
        """The step that reads all positions from rows of another branch, whose first one is at this position."""
        self.is_in_flight = True
        encoder_input = self.branch.request.encoder_input
        return CaptureStep(
            req_id=self.branch.branch_id,
            token_ids=[],
            spans=[],
            block_ids=(),
            captured=[position - first for position in self.extraction.positions],
            layers=self.extraction.layers,
            dtype=self.extraction.dtype,
            num_encoder_positions=0 if encoder_input is None else encoder_input.num_positions,
            adapter_slot=self.branch.request.adapter_slot,
            branch_id=branch_id,
            lens=self.extraction.lens,
            cross_heads=self.extraction.cross_heads,
        )

    def take_encoder_step(self) -> EncoderStep:
        """The whole input: an encoder input is never split."""
        encoder_input, extraction = self.branch.request.encoder_input, self.extraction
        assert encoder_input is not None
        self.is_in_flight = True
        return EncoderStep(
            self.branch.branch_id,
            encoder_input,
            [],
            extraction.positions,
            extraction.layers,
            extraction.dtype,
            self.branch.request.adapter_slot,
        )

    def confirm(self, step: CaptureStep | EncoderStep) -> None:
        """The step's rows were run, and the requested ones read out."""
        self.is_in_flight = False
        self.num_captured += len(step.captured)
        if isinstance(step, EncoderStep):
            self.num_rows_run += step.encoder_input.num_positions
        else:
            self.num_rows_run += len(step.token_ids)
        if step.captured:
            self.num_passed_by = 0

    def num_written_tokens(self, plan: SchedulerOutput, branch_id: str) -> int:
        spans = [span for capture in plan.captures if capture.req_id == branch_id for span in capture.spans]
        return sum(count for _, count, is_written in spans if is_written)

    def reclaim(self) -> None:
        self.is_in_flight = False
        if self.branch.status == BranchStatus.RUNNING:
            self.queue.requeue(self)

    def release(self) -> None:
        self.queue.remove(self)


class ExtractionQueue:
    """Waiting and running extractions. Waiting owners take turns; those of one owner are served in order."""

    def __init__(self) -> None:
        self.running: list[ExtractionTask] = []  # hold blocks
        self._waiting: deque[ExtractionTask] = deque()

    def __len__(self) -> int:
        return len(self._waiting) + len(self.running)

    def __iter__(self) -> Iterator[ExtractionTask]:
        yield from self.running
        yield from self._waiting

    @property
    def waiting(self) -> deque[ExtractionTask]:
        return self._waiting

    @property
    def first(self) -> ExtractionTask | None:
        """The next extraction."""
        if self.running:
            return self.running[0]
        return self._waiting[0] if self._waiting else None

    @property
    def aged(self) -> ExtractionTask | None:
        """The first, if it was overtaken too often. Only rows read out reset the count, so that generation gets its
        turn; rows that were merely computed do not, since their keys and values may be lost again."""
        first = self.first
        return first if first is not None and first.num_passed_by >= PATIENCE else None

    def add(self, state: ExtractionTask) -> None:
        """QueueFullError: its owner has too many that wait."""
        waiting = Counter(other.owner for other in self._waiting) if len(self._waiting) >= MAX_WAITING else {}
        if not has_room(waiting, state.owner, 1, MAX_WAITING):
            raise QueueFullError(
                "hidden_states", f"{len(self._waiting)} extractions are waiting already", "try again in a moment"
            )
        self.add_reading(state)

    def add_reading(self, state: ExtractionTask) -> None:
        """Adds, without a limit, a reading of a text that has ended: its request was admitted."""
        self._waiting.insert(self._place_for(state), state)

    def _place_for(self, state: ExtractionTask) -> int:
        """Returns the place after as many of each other owner's extractions as this owner has."""
        if not self._waiting or self._waiting[-1].owner == state.owner:
            return len(self._waiting)  # without owners, always
        num_own = sum(other.owner == state.owner for other in self._waiting)
        seen: Counter[str | None] = Counter()
        for place, other in enumerate(self._waiting):
            if seen[other.owner] > num_own:
                return place
            seen[other.owner] += 1
        return len(self._waiting)

    def begin(self, state: ExtractionTask) -> None:
        self._waiting.remove(state)
        self.running.append(state)

    def requeue(self, state: ExtractionTask) -> None:
        """Queues an extraction again that was preempted."""
        state.num_passed_by += 1
        self.running.remove(state)
        self._waiting.appendleft(state)

    def remove(self, state: ExtractionTask) -> None:
        if state in self.running:
            self.running.remove(state)
        elif state in self._waiting:  # else it waits for its adapter
            self._waiting.remove(state)
