"""Steps that several owners share: how many tokens a step has, each owner's part of it, and turns within a part.

A step that owners share takes at most as many times the duration of the smallest owner's part alone as there are
owners: each of two owners gets its tokens at half the rate that it would have alone, or faster. A part of that time is
left for what is outside of steps and grows with what they compute, such as sending log-probabilities. Of the tokens
that such a step has, the owners get equal parts, as far as they want so many.

A part is smaller than what its owner has to run, so its branches take turns. An owner's round is what would be one of
its steps if it were alone, spread over several: each decoding branch runs once, then prompts and other rows take the
rest of the round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ratoon.scheduling.branch import Branch
from ratoon.scheduling.pace import StepPace
from ratoon.scheduling.shares import Owner, fair_split

# The duration of a step, in steps of one token, while an owner is away that may return: its next request waits for the
# steps in flight.
STEP_FOR_RETURNING = 4.0
PART_FOR_STEPS = 0.7  # of the time between two tokens of an owner that shares steps


class Round:
    __slots__ = ("debt", "left", "number")

    def __init__(self, number: int, left: int) -> None:
        self.number = number  # no other round of any owner has it
        self.left = left  # tokens, until the next one begins
        self.debt = 0  # tokens of rows that run all or none, beyond the owner's part of a step


class StepShares:
    """One step: what is left of each owner's part."""

    __slots__ = ("_cost_of_read", "_left", "_planned", "_rounds", "given")

    def __init__(self, given: dict[Owner, int], rounds: dict[Owner, Round], cost_of_read: float = 1.0) -> None:
        """`cost_of_read`: of a prompt's token whose log-probabilities are read, in other tokens."""
        self.given = given
        self._cost_of_read = cost_of_read
        self._left = given.copy()
        self._planned: set[Branch] = set()
        self._rounds = rounds

    def left(self, owner: Owner) -> int:
        return self._left.get(owner, 0)

    def left_for(self, branch: Branch) -> int:
        """The tokens that this branch may have: at least one, if its owner has anything left."""
        left = self.left(branch.request.owner)
        if left <= 1 or not branch.request.task.reads_prompt:
            return left
        return max(1, int(left / self._cost_of_read))

    def had_turn(self, branch: Branch) -> bool:
        """Whether this branch is in this step, or already ran in its owner's round."""
        owned = self._rounds.get(branch.request.owner)
        return branch in self._planned or (owned is not None and branch.turn == owned.number)

    def take(self, branch: Branch, num_tokens: int) -> None:
        """A negative number: the branch leaves the step."""
        owner = branch.request.owner
        cost = round(num_tokens * self._cost_of_read) if branch.request.task.reads_prompt else num_tokens
        self._left[owner] = self._left.get(owner, 0) - cost
        if num_tokens < 0:
            self._planned.discard(branch)
            return
        self._planned.add(branch)
        if owner in self._rounds:
            branch.turn = self._rounds[owner].number

    def hold(self, owner: Owner, num_tokens: int) -> None:
        """Keep tokens of an owner's part from what is planned next; a negative number ends that."""
        self._left[owner] = self._left.get(owner, 0) - num_tokens


class Turns:
    """The rounds of all owners, from step to step."""

    def __init__(self, pace: StepPace, token_budget: int) -> None:
        self._pace = pace
        self._token_budget = token_budget
        self._rounds: dict[Owner, Round] = {}
        self._num_rounds = 0

    def share_out(self, wants: Mapping[Owner, int], served: Callable[[Owner], int], others_return: bool) -> StepShares:
        """Divide a step among the owners that have something to run. `served`: what each was given so far;
        `others_return`: further owners had requests recently."""
        if len(wants) > self._token_budget:  # not even one token for each: those that were given least are next
            wants = {owner: wants[owner] for owner in sorted(wants, key=served)[: self._token_budget]}
        num_tokens = self._num_tokens(wants, others_return)
        given = fair_split(num_tokens, wants)
        self._rounds = {owner: self._rounds.get(owner) or self._new_round() for owner in given}
        for owner, owned in self._rounds.items():
            if owned.left <= 0:
                self._begin_anew(owner)
            paid = min(owned.debt, given[owner]) if len(given) > 1 else 0
            owned.debt = owned.debt - paid if len(given) > 1 else 0
            given[owner] -= paid
        return StepShares(given, self._rounds, self._pace.cost_of_read(num_tokens))

    def begin_anew(self, shares: StepShares) -> bool:
        """The step is planned: owners that have tokens left begin their next rounds, because all their branches had a
        turn, or can't run. False: there is none."""
        owners = [owner for owner in shares.given if shares.left(owner) > 0]
        for owner in owners:
            self._begin_anew(owner)
        return bool(owners)

    def close(self, shares: StepShares) -> None:
        """The step is complete: count what each owner had."""
        for owner, given in shares.given.items():
            owned, left = self._rounds[owner], shares.left(owner)
            owned.left -= given - left
            owned.debt += max(0, -left)

    def end(self) -> None:
        """A single owner is left: it has whole steps."""
        self._rounds = {}

    def _num_tokens(self, wants: Mapping[Owner, int], others_return: bool) -> int:
        pace, most = self._pace, self._token_budget
        num_tokens = most
        if len(wants) > 1:
            num_tokens = pace.largest_within(PART_FOR_STEPS * len(wants), min(most, *wants.values()), most)
        if others_return:
            num_tokens = min(num_tokens, pace.largest_within(STEP_FOR_RETURNING, 1, most))
        return max(num_tokens, len(wants))

    def _new_round(self) -> Round:
        self._num_rounds += 1
        return Round(self._num_rounds, self._token_budget)

    def _begin_anew(self, owner: Owner) -> None:
        fresh, owned = self._new_round(), self._rounds[owner]
        owned.number, owned.left = fresh.number, fresh.left
