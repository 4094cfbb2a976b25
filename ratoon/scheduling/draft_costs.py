"""Tells what drafts cost, and how many tokens of how many branches are worth it.

The time of steps by their rows is observed (`StepPace`), and so is how much longer a branch waits for a step with a
draft of it (`ResultWaits`). From these follows what a draft of so many tokens takes, in steps without any. Which source
guesses, and how often it is right, is the matter of `speculation.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from ratoon.core.speculation import SpeculationConfig
from ratoon.scheduling.pace import StepPace

# Tokens that a draft may have: with the token before them a power of two, as kernels and graphs take rows. Few numbers,
# since every size of a step has to be recorded, which takes as long as several steps, and observed
LENGTHS = (1, 3, 7, 15, 31, 63)
HIGHEST_RATE = 0.99  # of right guesses, that is counted on
LEAST_GAIN = 0.05  # that a draft must promise, in tokens for each that comes without it
GAIN_OF_WAIT = 0.15  # likewise, where all branches must first wait for what is pending
# Rows that take as long as the rest of a step, at least: few steps of a size may have been observed, and all of them
# disturbed
LEAST_FREE_ROWS = 1
LEAST_COST = 0.02  # of a row, in rows
MOST_COST = 0.8  # where each row takes longer, nothing is to be gained
RESULTS_OF_LOOK = 8  # between two looks at how many branches should draft, unless their number changes by an eighth
RECENT_WAITS = 16  # of branches without drafts, of which the least counts
WEIGHT_OF_WAIT = 1 / 8  # of the newest observation in how long others wait for a result
MOST_WAIT = 4.0  # that is counted of one, in steps: a prompt may have been computed in between
RESULTS_OF_TOGETHER = 128  # without drafts, behind which is forgotten how long branches waited that all had some
PLAIN_RESULTS = 8  # without drafts, behind which waits are those of an engine that does not draft


class Draftable(Protocol):
    """A draft whose length is still to be found."""

    rate: float  # of guesses that are right
    available: int  # of its tokens may be checked
    length: int
    is_trial: bool


class ResultWaits:
    """How long branches wait for their next tokens, in steps of their size: without drafts, and with some, less what
    their rows cost. With steps in flight the first is 1, and the second more. A branch that drafts alone misses a step.
    Where most of them draft, they have one step together, and the device waits for the host. Branches beside those that
    draft wait longer too, because steps then have a part of the branches each: that is no wait without drafts."""

    __slots__ = ("_num_plain", "_plain", "drafted", "together")

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=RECENT_WAITS)
        self.drafted = 1.0
        self.together: float | None = None  # where most branches of a step draft; None: not known
        self._num_plain = PLAIN_RESULTS  # results since one with drafts

    @property
    def plain(self) -> float:
        """Without drafts. The least of late, since branches also wait for prompts, or for others that end."""
        return max(1.0, min(self._plain, default=1.0))

    @property
    def without_drafts(self) -> bool:
        """Whether no result of late had drafts."""
        return self._num_plain > PLAIN_RESULTS

    def take_result(self, has_drafts: bool) -> None:
        self._num_plain = 0 if has_drafts else self._num_plain + 1
        if self._num_plain == RESULTS_OF_TOGETHER:
            self.together = None  # what it was is outdated

    def observe(self, num_steps: float, time_of_drafts: float | None, of_most: bool = False) -> None:
        """`time_of_drafts`: that their rows take, in steps; None: there were none. `of_most`: most branches of the step
        had some."""
        if time_of_drafts is None:
            if self.without_drafts:
                self._plain.append(num_steps)
        elif of_most and self.together is not None:
            self.together = _mean(self.together, num_steps - time_of_drafts)
        elif not of_most:
            self.drafted = _mean(self.drafted, num_steps - time_of_drafts)


def _mean(mean: float, num_steps: float) -> float:
    """The mean of late, with a further observation."""
    return mean + (max(1.0, min(num_steps, MOST_WAIT)) - mean) * WEIGHT_OF_WAIT


class DraftCosts:
    def __init__(self, config: SpeculationConfig, pace: StepPace) -> None:
        self._config = config
        self._pace = pace
        most = config.most_tokens
        self._lengths = [length for length in LENGTHS if length < most] + [most]
        self._times: list[float] = []  # of these, as found for the result that is being taken
        self._num_rows = 1
        self._rows_of_look = self._num_of_look = 0  # rows for which was found who may draft, and results since then
        self.waits = ResultWaits()
        self.may_draft = True  # whether drafts would be worth their rows if all of them were right
        self.share = 1.0  # of the branches that should draft
        self.share_is_due = False  # it is to be found again

    def begin(self, num_rows: int) -> None:
        """A result came, and so many branches run."""
        self._num_rows = max(1, num_rows)
        self._times = []
        if self._config.max_seqs is not None:
            self.may_draft = num_rows <= self._config.max_seqs
            return
        self._num_of_look += 1
        has_changed = abs(num_rows - self._rows_of_look) * RESULTS_OF_LOOK > num_rows
        self.share_is_due = has_changed or self._num_of_look >= RESULTS_OF_LOOK
        if self.share_is_due:
            self._rows_of_look, self._num_of_look = num_rows, 0
            self.may_draft = self._num_drafting([HIGHEST_RATE] * self._num_rows) > 0

    def find_share(self, rates: Iterable[float]) -> None:
        """Finds the share of the branches that should draft. `rates`: how many guesses of each were right of late."""
        found = sorted((min(rate, HIGHEST_RATE) for rate in rates), reverse=True)
        found += [0.0] * (self._num_rows - len(found))
        self.share = self._num_drafting(found) / len(found)

    def whole(self, count: int) -> int:
        """Returns the largest length of a draft that is not above `count`."""
        return self._lengths[bisect_right(self._lengths, count) - 1] if count > 0 else 0

    def length(self, rate: float, of_drafting: float = 0.0) -> int:
        """The tokens to draft: as many as bring the most tokens in the same time. The k-th is right with probability
        rate ** k, and the result of a step with k of them comes later by the wait for it and by k rows. `of_drafting`:
        what the device takes to draft one of them, in steps."""
        if rate < self._config.min_acceptance:
            return 0
        if not self._times:
            self._times = [self.time_of(count) for count in self._lengths]
        rate = min(rate, HIGHEST_RATE)
        plain = drafted = 1.0
        if self._config.max_seqs is None:
            plain, drafted = self.waits.plain, self._wait(round(self.share * self._num_rows), self._num_rows)
        length, most = 0, (1 + LEAST_GAIN) / plain
        # Further ones may bring more again: a ninth row may take long, and the seven behind it next to nothing
        for count, time in zip(self._lengths, self._times):
            per_step = tokens_of(rate, count) / (drafted + time + count * of_drafting)
            if per_step > most:
                length, most = count, per_step
        return length

    def level(self, drafts: Collection[Draftable], is_pending: bool) -> None:
        """Gives all drafts of a step one length, or none, if that brings more tokens in the same time than the lengths
        that they have. A step may take as long with a few rows less or many more, which shows only where the rows of
        all are added up. `is_pending`: the results of steps in flight come first."""
        if self._config.max_seqs is not None:
            return
        usable = [draft for draft in drafts if draft.rate >= self._config.min_acceptance and not draft.is_trial]
        seconds = self._pace.seconds_of_rows(self._num_rows)
        if seconds is None:
            return
        gain = GAIN_OF_WAIT if is_pending else LEAST_GAIN
        best, most = None, self._in_time([draft.length for draft in usable], usable, seconds, gain)
        if most is None:
            return  # a step of that size is to be observed first
        for length in (0, *self._lengths):
            in_time = self._in_time([min(length, draft.available) for draft in usable], usable, seconds, gain)
            if in_time is not None and in_time > most:
                best, most = length, in_time
        if best is not None:
            for draft in usable:
                draft.length = min(best, draft.available)

    def _in_time(
        self, lengths: Sequence[int], drafts: Sequence[Draftable], seconds: float, gain: float
    ) -> float | None:
        """Returns the tokens that a step of all branches brings, in the time of one without drafts, which takes so many
        seconds, and counts for more by `gain`. None: it is not known."""
        num_drafts = sum(lengths)
        if not num_drafts:
            return self._num_rows * (1 + gain) / self.waits.plain
        num_tokens = self._num_rows + num_drafts
        if not self._pace.has_observed(num_tokens):
            return None
        tokens = self._num_rows - len(drafts) + 0.0
        tokens += sum(tokens_of(min(one.rate, HIGHEST_RATE), length) for one, length in zip(drafts, lengths))
        return tokens * seconds / (self._pace.seconds(num_tokens) + self._pace.idle_seconds(num_tokens))

    def time_of(self, count: int) -> float:
        """Returns the time of so many rows for the drafts of a branch, in steps, if others that should draft have as
        many. Time may grow in stairs, so that few rows tell little of what as many for each branch take."""
        if self._config.max_seqs is not None:
            return count * LEAST_COST
        return count * self._cost_of_rows(max(count, round(count * self._num_rows * self.share)), self._num_rows)

    def _num_drafting(self, rates: Sequence[float]) -> int:
        """Returns how many branches should draft, those with the first of these rates, which descend, so that all of
        them together get the most tokens. Few drafts can cost much: a step of one row more can take twice as long, and
        one of eight times the rows not much longer."""
        num_rows = len(rates)
        plain = self.waits.plain
        found, most = 0, num_rows / plain
        usable = [rate for rate in rates if rate >= self._config.min_acceptance]
        for length in self._lengths:
            tokens = 0.0
            for count, rate in enumerate(usable, 1):
                tokens += tokens_of(rate, length)
                if count & (count - 1) and count < len(usable):
                    continue  # powers of two, and all
                time = length * count / num_rows * self._cost_of_rows(length * count, num_rows)
                of_drafts = tokens / (self._wait(count, num_rows) + time)
                in_time = (num_rows - count) / (plain + time) + of_drafts - LEAST_GAIN * count / plain
                if in_time > most:
                    found, most = count, in_time
        return found

    def observe_wait(self, seconds: float, num_rows: int, num_drafts: int, of_most: bool) -> None:
        """A branch, one of `num_rows`, waited so long for its next tokens, in a step with so many drafts of it.
        `of_most`: most branches of that step had some."""
        of_step = self._pace.seconds_of_rows(num_rows)
        if of_step is None:
            return
        if num_drafts and of_most and self.waits.together is None:
            self.waits.together = self._wait(num_rows, num_rows)
        self.waits.observe(seconds / of_step, self.time_of(num_drafts) if num_drafts else None, of_most)

    def _wait(self, count: int, num_rows: int) -> float:
        """Returns how long branches wait for the result of a step with drafts, in steps, if so many of them draft.
        Where most do and none has done so of late, only the host's time for a plan is counted."""
        if 2 * count <= num_rows and num_rows > 1:
            return self.waits.drafted
        if self.waits.together is not None:
            return self.waits.together
        seconds = self._pace.seconds_of_rows(num_rows)
        return 1.0 if seconds is None else 1.0 + self._pace.idle_seconds(num_rows) / seconds

    def _cost_of_rows(self, count: int, num_rows: int) -> float:
        """Returns the cost of each of so many further rows, in rows of a step of `num_rows`: 1 where time grows in
        proportion to rows, less where a step takes about as long with a few more."""
        cost = self._pace.cost_of_rows(num_rows, count)
        if cost is None:
            cost = num_rows / (num_rows + self._config.free_rows)
        cost = max(min(cost, num_rows / (num_rows + LEAST_FREE_ROWS)), LEAST_COST)
        return cost if cost <= MOST_COST else 1.0


def tokens_of(rate: float, num_drafts: int) -> float:
    """The tokens that a branch gets from a step with so many drafts, on average."""
    return (1 - rate ** (num_drafts + 1)) / (1 - rate)
