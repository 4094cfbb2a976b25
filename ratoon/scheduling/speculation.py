"""Which branches draft, from which source, and how far: by the share of guesses that was right, and what a row costs.

A guess that is not drafted costs nothing, because it is compared with the token that comes anyway. So a source whose
guesses are wrong is left out, and is back as soon as they are right; text that repeats nothing runs as without drafts.

With steps in flight a branch is planned before its last token is known, and goes on so while no source has a draft that
is worth it. Where one has, the branch is left out of the next plan, until no token of it is pending: the device then
waits for the host, or computes steps of other branches. How much longer a branch waits for such a step is observed, and
is part of what a draft costs. Many branches with drafts would fall into groups that take turns, and every step would
read all weights for one group. Where one step of all brings more, its plan waits for the steps in flight.

A source on the device drafts behind a step, as many tokens as the plan says. That takes time even where nothing is
checked, so it is asked for no more than what seems to be worth it, and from time to time for one token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ratoon.core.request import CheckedDrafts
from ratoon.core.speculation import SpeculationConfig
from ratoon.core.stats import DraftStats
from ratoon.scheduling.branch import Branch
from ratoon.scheduling.draft_costs import DraftCosts
from ratoon.scheduling.drafters.device import DeviceDrafter
from ratoon.scheduling.drafters.interface import Drafter
from ratoon.scheduling.drafters.prediction import PredictionDrafter
from ratoon.scheduling.drafters.roots import RootsDrafter
from ratoon.scheduling.pace import StepPace

# The more tokens a source has found before its guess, the likelier that is right. So shares of right guesses are kept
# for sources that have found none, for matches of one token to five, of six and more, and so on
MATCHES = (1, 6, 12, 24)
# These shares before any guess was compared. Behind a short match the first guess is not drafted, by default.
FIRST_RATES = (0.6, 0.38, 0.65, 0.87, 0.97)
FIRST_RATE_OF = {PredictionDrafter.name: 0.9}  # of a source that promises more without a match
WEIGHT = 1 / 8  # of the newest guess in its share
LOWEST_RATE = 0.3  # a source that was wrong for long needs few right guesses to be back
FIRST_ON_DEVICE = 7  # tokens that the device drafts behind the first step of a branch
RESULTS_OF_TRIAL = 4  # until no token of a branch is pending any more, with as many steps in flight as there can be
LEAST_RATE_OF_TRIAL = 0.6  # of right guesses of a source, so that a trial brings about what it costs
TRIES = 128  # one in so many drafts that seem to cost too much is made, because that estimate may be outdated
FIRST_ROWS, FIRST_TOKENS = 4.0, 2.0  # of a branch with a draft: its rows in a step, and the tokens that it gets from it
WEIGHT_OF_DRAFT = 1 / 16  # of the newest draft in these
GATHERINGS = 32  # one in so many plans waits for steps in flight if how long such a step takes is not known
LEAST_ROWS = 64  # that a step may read, sampled tokens and drafts together, where fewer sequences may run


def num_equal(drafts: Sequence[int], token_ids: Sequence[int]) -> int:
    """Returns how many of the first drafts became tokens."""
    count = 0
    for draft, token in zip(drafts, token_ids):
        if draft != token:
            break
        count += 1
    return count


class SourceRecord:
    """A source, and how often it was right about a branch, by the length of its matches."""

    __slots__ = ("drafter", "guess", "guess_at", "match", "num_left_out", "rates")

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.rates = list(FIRST_RATES)
        self.rates[0] = FIRST_RATE_OF.get(drafter.name, self.rates[0])
        self.match = 0  # of MATCHES, the length of the newest one
        self.guess = -1  # at the token of this place, which is not known yet; -1: none
        self.guess_at = 0
        self.num_left_out = 0  # steps behind which the device could have drafted

    @property
    def rate(self) -> float:
        """The share of guesses that are right behind a match like the newest one."""
        return self.rates[self.match]

    def compare(self, token_ids: Sequence[int]) -> None:
        """Compares the last guess, unless its token is still unknown."""
        if self.guess >= 0 and self.guess_at < len(token_ids):
            self.count(token_ids[self.guess_at] == self.guess)
            self.guess = -1

    def count(self, is_right: bool) -> None:
        rate = self.rates[self.match]
        self.rates[self.match] = max(LOWEST_RATE, rate + (is_right - rate) * WEIGHT)

    def propose(self, branch: Branch, max_tokens: int) -> Sequence[int]:
        drafts = self.drafter.propose(branch, max_tokens)
        if drafts:
            self.match = bisect_right(MATCHES, self.drafter.num_matched(branch))
        return drafts


@dataclass(slots=True)
class Draft:
    """A draft holds what a source guesses behind the newest token of a branch, and how much of it is checked."""

    tokens: Sequence[int]  # the first ones of which are pending
    record: SourceRecord
    rate: float
    available: int  # of its tokens may be checked
    length: int  # that are checked
    is_trial: bool = False  # although it seems to cost too much


class BranchDrafts:
    """The sources of a branch, by priority, and which of them made the draft that is being checked."""

    __slots__ = ("drafted_by", "last_result", "num_checked", "num_tries", "rate", "records")

    def __init__(self, drafters: Iterable[Drafter]) -> None:
        self.records = [SourceRecord(drafter) for drafter in drafters]
        self.drafted_by: SourceRecord | None = None
        self.last_result: float | None = None  # when it came
        self.num_checked = 0  # drafts that the newest result is about
        self.num_tries = 0  # results behind which it drafts a token even if that seems not to be worth it
        self.rate = self.records[0].rate  # of the best guess behind the newest token; 0: no source had one


class Speculation:
    def __init__(
        self,
        config: SpeculationConfig,
        drafters: Sequence[Drafter],
        pace: StepPace,
        max_num_seqs: int,
        draft_cost: float = 0.0,
    ) -> None:
        """`draft_cost`: of a token that the device drafts, in steps of the model."""
        self.config = config
        self._most = config.most_tokens
        self._device = next((one for one in drafters if isinstance(one, DeviceDrafter)), None)
        self._draft_cost = draft_cost
        self.stats: dict[str, DraftStats] = {}  # by source
        self._drafters = drafters
        self._prediction = PredictionDrafter()
        self._roots = next((one for one in drafters if isinstance(one, RootsDrafter)), None)
        self._drafts: dict[Branch, BranchDrafts] = {}  # of unfinished branches that may draft
        self._pace = pace
        self._max_rows = max(max_num_seqs, LEAST_ROWS)
        self._costs = DraftCosts(config, pace)
        self._num_held_back = 0  # results behind which a draft seemed to cost too much
        self._has_held_back = False  # behind this one
        self._num_dear = 0  # results behind which rows seemed to cost too much
        self._rows_of_draft, self._tokens_of_draft = FIRST_ROWS, FIRST_TOKENS  # of a branch with a draft, of late
        self._num_not_known = 0  # plans for which it was not known whether to wait
        self._last_with_others = -1.0  # when the last result came of a step that had more than next tokens and drafts

    # ---- branches ----

    def open(self, branch: Branch) -> None:
        """A branch is sampled: it may draft, unless its request says otherwise."""
        request = branch.request
        drafters = [self._prediction, *self._drafters] if request.prediction else self._drafters
        if request.media:  # what drafts on the device would read the ids of placeholders
            drafters = [one for one in drafters if one is not self._device]
        if drafters and request.speculates:
            branch.speculates = True
            self._drafts[branch] = BranchDrafts(drafters)
            if self._device in drafters:
                branch.num_to_draft = min(self._most, FIRST_ON_DEVICE)

    def close(self, branch: Branch) -> None:
        """A branch ended."""
        if branch.speculates:
            branch.speculates, branch.num_to_draft = False, 0
            for record in self._drafts.pop(branch).records:
                record.drafter.drop(branch)

    @property
    def has_branches(self) -> bool:
        """Whether any branch may draft."""
        return bool(self._drafts)

    # ---- texts of ended requests ----

    def text_ended(self, branch: Branch) -> None:
        """The text of a branch stays as a root, also if the branch was aborted: later ones may draft from it."""
        if self._roots is not None and branch.num_output_tokens:
            self._roots.add(branch)

    def forget_texts(self, branch_ids: Iterable[str]) -> None:
        if self._roots is not None:
            self._roots.forget(branch_ids)
            self._roots.work()

    @property
    def has_work_beside_step(self) -> bool:
        return self._roots is not None and self._roots.has_work

    def work_beside_step(self) -> None:
        """Does a part of what texts that came or went have left to do."""
        if self._roots is not None:
            self._roots.work()

    def check(self) -> None:
        """Raises AssertionError unless what is kept of texts agrees with its counts. Slow: for tests."""
        if self._roots is not None:
            self._roots.check()

    def snapshot(self) -> dict[str, DraftStats]:
        return {name: stats.copy() for name, stats in self.stats.items()} if self.stats else {}

    # ---- results ----

    def checked(self, branch: Branch, drafts: Sequence[int], token_ids: Sequence[int]) -> CheckedDrafts | None:
        """A step checked drafts of a branch, which got these tokens from it."""
        drafting = self._drafts[branch]
        drafting.num_checked = len(drafts)
        record = drafting.drafted_by
        if record is None:
            return None
        num_accepted = num_equal(drafts, token_ids)
        for _ in range(num_accepted):
            record.count(True)
        if num_accepted < min(len(drafts), len(token_ids)):
            record.count(False)
        record.guess = -1
        name = record.drafter.name
        if name not in self.stats:
            self.stats[name] = DraftStats()
        self.stats[name].add(len(drafts), num_accepted)
        self._rows_of_draft += (len(drafts) + 1 - self._rows_of_draft) * WEIGHT_OF_DRAFT
        self._tokens_of_draft += (num_accepted + 1 - self._tokens_of_draft) * WEIGHT_OF_DRAFT
        return CheckedDrafts(name, len(drafts), num_accepted)

    def receive(self, drafts: Mapping[str, Sequence[int]], branches: Iterable[Branch]) -> None:
        """The device drafted behind a step, by branch id; these branches got tokens from it."""
        for branch in branches:
            if self._device is not None and branch.branch_id in drafts:
                self._device.receive(branch, drafts[branch.branch_id])

    def advance(self, branches: list[Branch], num_rows: int, now: float) -> None:
        """These branches got tokens: compare guesses with them, and let those draft for which it is worth it.
        `num_rows`: of all running branches. `now`: when the result came."""
        costs = self._costs
        costs.begin(num_rows)
        self._observe_waits(branches, num_rows, now)
        may_draft, self._has_held_back = costs.may_draft, False
        is_trial = not may_draft and self._is_trial()
        room = self._max_rows - num_rows
        most = max(1, int(room // max(1.0, costs.share * num_rows)))  # of a draft: there is room for as many of all
        lengths: dict[float, int] = {}  # by rate: many branches have the same
        found: dict[Branch, Draft] = {}
        for branch in branches:
            drafting = self._drafts[branch]
            for record in drafting.records:
                record.compare(branch.token_ids)
            if is_trial:
                drafting.num_tries = RESULTS_OF_TRIAL
            if may_draft or drafting.num_tries:
                draft = self._draft(branch, drafting, most, room, lengths)
                if draft is not None:
                    found[branch] = draft
        if may_draft and 2 * len(found) > num_rows > 1:
            costs.level(found.values(), is_pending=any(branch.num_pending for branch in found))
        for branch in branches:
            drafting, draft = self._drafts[branch], found.get(branch)
            drafts: Sequence[int] = ()
            drafting.drafted_by = None
            if draft is not None and draft.length > 0 and room > 0:
                drafts = draft.tokens[: min(draft.length, room) + branch.num_pending]
                drafting.drafted_by = draft.record
            drafting.num_tries = max(0, drafting.num_tries - 1) if branch.num_pending else 0
            # What is pending is known before the draft is checked
            branch.waits_to_draft = branch.num_pending > 0 and len(drafts) > branch.num_pending
            if branch.waits_to_draft:
                branch.write_limit = 0  # the planner looks at it
            elif drafts and not branch.num_pending:
                source = drafting.drafted_by
                branch.propose(drafts, of_device=source is not None and source.drafter is self._device)
                room -= len(drafts)
            if self._device is not None:
                branch.num_to_draft = self._length_on_device(drafting, room) if may_draft else 0
        if costs.share_is_due:
            costs.find_share(drafting.rate for drafting in self._drafts.values())

    # ---- plans ----

    def gathers(self, running: Iterable[Branch]) -> bool:
        """Whether the next plan should wait for the steps in flight, so that branches with drafts in these are in it.

        Otherwise the branches that can be planned now have a step of their own, and the next one has those whose
        results are there by then: with drafts in the first of these steps, a branch is not in the second. Compared are
        tokens a second.
        """
        if self._costs.waits.without_drafts:
            return False
        num_plain = num_drafting = num_rows = num_away = 0
        rows_away = tokens_away = 0.0
        for branch in running:
            gap = branch.num_tokens + branch.num_pending - branch.num_computed_tokens
            if branch.num_drafts or (branch.waits_to_draft and branch.num_pending):
                num_away += 1
                rows_away += self._rows_of_draft
                tokens_away += self._tokens_of_draft
            elif gap > 1 or branch.num_rows > 1:
                return False  # a prompt or a search goes on meanwhile
            elif gap < 1:
                rows_away += 1
                tokens_away += 1
            elif branch.draft_tokens:
                num_drafting += 1
                num_rows += 1 + len(branch.draft_tokens)
            else:
                num_plain += 1
        num_rows += num_plain
        if not num_away or not num_rows:
            return False
        together = round(num_rows + rows_away)
        if not self._pace.has_observed(together):
            self._num_not_known += 1
            return self._num_not_known % GATHERINGS == 0
        tokens = num_plain + num_drafting * self._tokens_of_draft + tokens_away
        seconds = self._pace.seconds
        apart = seconds(num_rows) + seconds(round(num_plain + rows_away))
        return tokens * apart > (tokens + num_plain) * (seconds(together) + self._pace.idle_seconds(together))

    def take_step(self, num_tokens: int, num_rows: int, now: float) -> None:
        """A step of so many tokens is done, of which so many are sampled from, or are drafts. Where it had others, as
        of prompts, branches have waited for these."""
        if num_tokens > num_rows:
            self._last_with_others = now

    def _observe_waits(self, branches: list[Branch], num_rows: int, now: float) -> None:
        """Observes one branch that had drafts in the step, and one that had none."""
        num_with_drafts = sum(self._drafts[branch].num_checked > 0 for branch in branches)
        self._costs.waits.take_result(num_with_drafts > 0)
        of_most = 2 * num_with_drafts > len(branches)
        seen = set()
        for branch in branches:
            drafting = self._drafts[branch]
            before, drafting.last_result = drafting.last_result, now
            num_checked, drafting.num_checked = drafting.num_checked, 0
            if before is None or before < self._last_with_others:
                continue
            if now > before and bool(num_checked) not in seen:
                seen.add(bool(num_checked))
                self._costs.observe_wait(now - before, num_rows, num_checked, of_most)

    def _draft(
        self,
        branch: Branch,
        drafting: BranchDrafts,
        most: int,
        room: int,
        lengths: dict[float, int],
    ) -> Draft | None:
        """Returns the draft of the first source that has one worth its rows, behind the tokens that are pending; in a
        trial one token that is likely. Where there is neither, that of the first source that has any, of no length."""
        left = branch.max_total_tokens - branch.num_tokens - 1  # tokens before the last one
        drafting.rate = 0.0
        unused: Draft | None = None
        for record in drafting.records:
            drafts = record.propose(branch, max(min(self._most, room), 1))
            if not drafts:
                continue
            rate = record.rate
            drafting.rate = max(drafting.rate, rate)
            worth = lengths.get(rate)
            if worth is None:
                worth = lengths[rate] = self._costs.length(rate)
            available = min(most, room, len(drafts) - branch.num_pending, left)
            length = self._costs.whole(min(worth, available))
            record.guess, record.guess_at = drafts[0], branch.num_tokens
            draft = Draft(drafts, record, rate, available, length)
            if length > 0:
                return draft
            if worth == 0 and not drafting.num_tries and self._is_due(rate):
                drafting.num_tries = RESULTS_OF_TRIAL
            if drafting.num_tries and rate >= LEAST_RATE_OF_TRIAL and min(room, left) > branch.num_pending:
                draft.length, draft.is_trial = 1, True
                return draft
            unused = unused or draft
        return unused

    def _length_on_device(self, drafting: BranchDrafts, room: int) -> int:
        """The tokens that the device drafts behind the next step of a branch."""
        record = next((one for one in drafting.records if one.drafter is self._device), None)
        if record is None:
            return 0
        drafting.rate = max(drafting.rate, record.rate)
        of_drafting = 0.0 if self.config.max_seqs is not None else self._draft_cost
        length = min(self._costs.length(record.rate, of_drafting), room)
        if length > 0:
            return length
        record.num_left_out += 1
        return int(record.num_left_out % TRIES == 0)

    def _is_trial(self) -> bool:
        """Whether the branches of a result draft one token each although rows seem to cost too much: the one step of
        such a size that was observed may have been disturbed, as by the capture of its graph."""
        self._num_dear += 1
        return self.config.max_seqs is None and self._num_dear % TRIES == 0

    def _is_due(self, rate: float) -> bool:
        """Whether a draft that seems to cost too much is made all the same, of one branch and once in a while."""
        if rate < self.config.min_acceptance or self._has_held_back:
            return False
        self._has_held_back = True
        self._num_held_back += 1
        return self._num_held_back % TRIES == 0
