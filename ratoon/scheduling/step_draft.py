"""A step plan while it is being made: who is in it, and what is left of its budget. Who comes in is the planner's."""

from __future__ import annotations

from typing import Protocol

from ratoon.core.plan import BlockIds, SchedulerOutput
from ratoon.scheduling.branch import Branch


class PlannedRows(Protocol):
    """Rows of a step beside the tokens of branches. The kind of request that plans them writes them down."""

    @property
    def branch(self) -> Branch:
        """On whose account they run. They leave the step with it."""
        ...

    @property
    def num_tokens(self) -> int:
        """What they take of the step's budget."""
        ...

    def write(self, plan: SchedulerOutput) -> None: ...


class StepDraft:
    """A plan while it is being made: who runs, and what is left of the token budget."""

    __slots__ = (
        "allocated",
        "budget",
        "dropped_rows",
        "encoder_budget",
        "encoder_lengths",
        "gave_way",
        "in_place",
        "preempted",
        "rows",
    )

    def __init__(self, budget: int, encoder_budget: int = 0) -> None:
        self.budget = budget
        self.encoder_budget = encoder_budget
        self.encoder_lengths: list[int] = []  # positions of the encoder inputs that run
        self.in_place: list[Branch] = []  # one token each, into memory that they have
        self.allocated: list[tuple[Branch, int, BlockIds]] = []  # tokens, and blocks appended to the tables
        self.rows: list[PlannedRows] = []  # of kinds that plan rows of their own
        self.preempted = False
        self.gave_way: set[Branch] = set()  # to another owner's; they do not come back in this step
        self.dropped_rows: list[str] = []  # preempted branches that the runner knows

    def add(self, branch: Branch, num_tokens: int, appended: BlockIds) -> None:
        self.allocated.append((branch, num_tokens, appended))
        self.budget -= num_tokens

    def add_rows(self, rows: PlannedRows) -> None:
        self.rows.append(rows)
        self.budget -= rows.num_tokens

    def fits_encoder(self, num_positions: int) -> bool:
        """An input that is longer than the budget fits where no other runs."""
        return not self.encoder_lengths or sum(self.encoder_lengths) + num_positions <= self.encoder_budget

    @property
    def is_empty(self) -> bool:
        return not (self.in_place or self.allocated or self.rows)

    def remove(self, branch: Branch) -> None:
        """Take a branch out again, if it is in, and its tokens back. The rows that run on its account go with it."""
        for index, rows in enumerate(self.rows):
            if rows.branch is branch:
                del self.rows[index]
                self.budget += rows.num_tokens
                return
        for index, (other, num_tokens, _) in enumerate(self.allocated):
            if other is branch:
                del self.allocated[index]
                self.budget += num_tokens
                return
        if branch in self.in_place:
            self.in_place.remove(branch)
            self.budget += 1
