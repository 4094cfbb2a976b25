"""A step plan under construction: its branches and the remaining budget. The planner decides what enters."""

from __future__ import annotations

from typing import Protocol

from ratoon.core.plan import BlockIds, SchedulerOutput
from ratoon.scheduling.branch import Branch
from ratoon.scheduling.shares import Owner
from ratoon.scheduling.turns import StepShares

NO_LIMIT = 1 << 62


class PlannedRows(Protocol):
    """Rows of a step other than the tokens of branches, written to the plan by the kind of request that planned
    them."""

    @property
    def branch(self) -> Branch:
        """The branch that they belong to. They leave the step with it."""
        ...

    @property
    def num_tokens(self) -> int:
        """Their cost in the step's token budget."""
        ...

    def write(self, plan: SchedulerOutput) -> None: ...


class StepDraft:
    """A plan under construction: scheduled branches, and the remaining token budget."""

    __slots__ = (
        "allocated",
        "budget",
        "dropped_rows",
        "encoder_budget",
        "encoder_lengths",
        "in_place",
        "max_decodes",
        "preempted",
        "preempted_for_share",
        "rows",
        "shares",
    )

    def __init__(self, budget: int, encoder_budget: int = 0) -> None:
        self.budget = budget
        self.encoder_budget = encoder_budget
        self.encoder_lengths: list[int] = []  # positions of the encoder inputs that run
        self.in_place: list[Branch] = []  # one token each, in allocated memory
        self.allocated: list[tuple[Branch, int, BlockIds]] = []  # tokens, and blocks appended to the tables
        self.max_decodes = NO_LIMIT  # branches with one token each; the others are left to the next step
        self.rows: list[PlannedRows] = []  # of kinds that plan rows
        self.preempted = False
        self.preempted_for_share: set[Branch] = set()  # for another owner; not resumed in this step
        self.dropped_rows: list[str] = []  # preempted branches that the runner knows
        self.shares: StepShares | None = None  # set: owners share the step, and each has its part of the budget

    def room(self, owner: Owner) -> int:
        """The tokens that this owner may still have in this step."""
        return self.budget if self.shares is None else min(self.budget, self.shares.left(owner))

    def room_for(self, branch: Branch) -> int:
        """The tokens that this branch may have in this step."""
        return self.budget if self.shares is None else min(self.budget, self.shares.left_for(branch))

    def has_room(self, owner: Owner) -> bool:
        return self.room(owner) > 0

    def hold(self, owner: Owner, num_tokens: int) -> None:
        """Keep tokens of this owner from what is planned next; a negative number ends that."""
        self.budget -= num_tokens
        if self.shares is not None:
            self.shares.hold(owner, num_tokens)

    @property
    def may_decode(self) -> bool:
        """Whether the step takes a further branch with one token."""
        return len(self.in_place) + len(self.allocated) < self.max_decodes

    def may_run(self, branch: Branch) -> bool:
        """Whether it is the turn of a branch that runs one token of each row, or its rows all or none."""
        if self.shares is None:
            return True
        return (
            self.budget >= branch.num_rows and self.room(branch.request.owner) > 0 and not self.shares.had_turn(branch)
        )

    def add_in_place(self, branch: Branch) -> None:
        self.in_place.append(branch)
        self._spend(branch, 1)

    def add(self, branch: Branch, num_tokens: int, appended: BlockIds) -> None:
        self.allocated.append((branch, num_tokens, appended))
        self._spend(branch, num_tokens)

    def add_rows(self, rows: PlannedRows) -> None:
        self.rows.append(rows)
        self._spend(rows.branch, rows.num_tokens)

    def _spend(self, branch: Branch, num_tokens: int) -> None:
        """A negative number is given back."""
        self.budget -= num_tokens
        if self.shares is not None:
            self.shares.take(branch, num_tokens)

    def rows_of(self, branch: Branch) -> range:
        """Returns the positions of a branch that the step computes, often none."""
        if branch in self.in_place:
            return range(branch.num_computed_tokens, branch.num_computed_tokens + 1)
        count = next((num_tokens for other, num_tokens, _ in self.allocated if other is branch), 0)
        return range(branch.num_computed_tokens, branch.num_computed_tokens + count)

    def fits_encoder(self, num_positions: int) -> bool:
        """An input longer than the budget fits if no other runs."""
        return not self.encoder_lengths or sum(self.encoder_lengths) + num_positions <= self.encoder_budget

    @property
    def is_empty(self) -> bool:
        return not (self.in_place or self.allocated or self.rows)

    def remove(self, branch: Branch) -> None:
        """Remove a branch and its rows, if present, and return its tokens to the budget."""
        for index, rows in enumerate(self.rows):
            if rows.branch is branch:
                del self.rows[index]
                self._spend(branch, -rows.num_tokens)
                return
        for index, (other, num_tokens, _) in enumerate(self.allocated):
            if other is branch:
                del self.allocated[index]
                self._spend(branch, -num_tokens)
                return
        if branch in self.in_place:
            self.in_place.remove(branch)
            self._spend(branch, -1)
