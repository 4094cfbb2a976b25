"""A step plan while it is being made: who is in it, and what is left of its budget. Who comes in is the scheduler's."""

from __future__ import annotations

from ratoon.core.plan import BlockIds
from ratoon.scheduling.beam_group import BeamGroup
from ratoon.scheduling.branch import Branch
from ratoon.scheduling.extraction import ExtractionState, Span


class StepDraft:
    """A plan while it is being made: who runs, and what is left of the token budget."""

    __slots__ = (
        "allocated",
        "beams",
        "budget",
        "captures",
        "dropped_rows",
        "encoder_budget",
        "encoder_lengths",
        "encoder_reads",
        "gave_way",
        "in_place",
        "preempted",
        "resumed",
    )

    def __init__(self, budget: int, encoder_budget: int = 0) -> None:
        self.budget = budget
        self.encoder_budget = encoder_budget
        self.encoder_lengths: list[int] = []  # positions of the encoder inputs that run
        self.encoder_reads: list[ExtractionState] = []  # those whose encoder input runs to be read out
        self.in_place: list[Branch] = []  # one token each, into memory that they have
        self.allocated: list[tuple[Branch, int, BlockIds]] = []  # tokens, and blocks appended to the tables
        self.beams: list[tuple[BeamGroup, int]] = []  # tokens of each beam
        self.resumed: list[Branch] = []  # trunks that came back from the host computed: only their beams run
        self.captures: list[tuple[ExtractionState, list[Span]]] = []
        self.preempted = False
        self.gave_way: set[Branch] = set()  # to another owner's; they do not come back in this step
        self.dropped_rows: list[str] = []  # preempted branches that the runner knows

    def add(self, branch: Branch, num_tokens: int, appended: BlockIds) -> None:
        self.allocated.append((branch, num_tokens, appended))
        self.budget -= num_tokens

    def add_beams(self, group: BeamGroup, num_tokens: int) -> None:
        self.beams.append((group, num_tokens))
        self.budget -= num_tokens * group.num_beams

    def add_capture(self, state: ExtractionState, spans: list[Span]) -> None:
        self.captures.append((state, spans))
        self.budget -= sum(count for _, count, _ in spans)

    def fits_encoder(self, num_positions: int) -> bool:
        """An input that is longer than the budget fits where no other runs."""
        return not self.encoder_lengths or sum(self.encoder_lengths) + num_positions <= self.encoder_budget

    @property
    def is_empty(self) -> bool:
        return not (self.in_place or self.allocated or self.beams or self.captures or self.encoder_reads)

    @property
    def num_spans(self) -> int:
        return sum(len(spans) for _, spans in self.captures)

    def remove(self, branch: Branch) -> None:
        """Take a branch out again, if it is in, and its tokens back. With a trunk its beams go."""
        if branch in self.resumed:
            self.resumed.remove(branch)
        for index, (group, num_tokens) in enumerate(self.beams):
            if group.trunk is branch:
                del self.beams[index]
                self.budget += num_tokens * group.num_beams
                return
        for index, (other, num_tokens, _) in enumerate(self.allocated):
            if other is branch:
                del self.allocated[index]
                self.budget += num_tokens
                return
        if branch in self.in_place:
            self.in_place.remove(branch)
            self.budget += 1
