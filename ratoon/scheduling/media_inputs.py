"""Which inputs of the encoder of media run in a step, and how far prompts get without those that do not.

A chunk of a prompt that reads rows of an image needs the encoder's output for it. If that is not on the device, the
input runs in the same step, within a budget of rows of its own and the room of the encoder cache; if it does not fit,
the chunk ends before the image. One input always fits where no other runs and none is held, so the first in the order
makes progress.
"""

from __future__ import annotations

from collections.abc import Iterable

from ratoon.core.media import EMBEDS
from ratoon.core.plan import SchedulerOutput
from ratoon.memory.encoder_cache import EncoderCache
from ratoon.scheduling.branch import Branch, BranchStatus
from ratoon.scheduling.media import MediaRun

Span = tuple[int, int, bool]  # as extraction.py has them: first position, count, whether keys and values are written


class MediaInputs:
    def __init__(self, cache: EncoderCache, budget: int) -> None:
        """`budget`: rows that the encoder makes in one step; an input with more runs alone."""
        self.cache = cache
        self._budget = budget

    # ---- a step is planned ----

    def fit(self, branch: Branch, start: int, count: int, most: int, *, may_cut: bool = True) -> int:
        """How many of the next `count` tokens of a branch, from position `start` on, can run in this step: it holds the
        outputs that they read. An image that is computed in one step and begins at `start` may take it beyond `count`,
        up to `most` tokens. With `may_cut` False, all of its inputs fit if no others run."""
        end = start + count
        for run in branch.request.media:
            if run.end <= start:
                continue
            if run.start >= end:
                break
            if run.is_whole and run.end > end:
                end = run.end if run.start <= start and run.end - start <= most else max(run.start, start)
                if end <= run.start or end == start:
                    break
            if not self._hold(branch, run, may_cut):
                end = max(run.start, start)
                break
        return end - start

    def fit_spans(self, branch: Branch, spans: list[Span], most: int) -> list[Span]:
        """Returns which rows of these spans of an extraction can run in this step, `most` tokens in all. Rows that are
        run again, and written nowhere, read the rows of an image behind them too, where these see each other in both
        directions."""
        fitting: list[Span] = []
        covered = 0  # an image may have taken the last span beyond where the next one begins
        for first, count, is_written in spans:
            first, count = max(first, covered), count - max(0, covered - first)
            if count <= 0:
                continue
            if first >= branch.media_end:
                num_tokens = min(count, most)
            else:
                num_tokens = self.fit(branch, first, min(count, most), most)
            if num_tokens:
                fitting.append((first, num_tokens, is_written))
            most, covered = most - num_tokens, first + num_tokens
            if num_tokens < count or most <= 0:
                break
        return fitting

    def least_tokens(self, branch: Branch) -> int:
        """The fewest tokens that a branch can go on with: an image that is computed in one step, or one."""
        position = branch.num_computed_tokens
        if position >= branch.media_end:
            return 1
        runs = (run for run in branch.request.media if run.is_whole and run.start <= position < run.end)
        return max((run.end - position for run in runs), default=1)

    def _hold(self, branch: Branch, run: MediaRun, may_cut: bool) -> bool:
        cache = self.cache
        if cache.hold(branch, run.key):
            return True
        if run.data.modality != EMBEDS and cache.num_rows_to_run:
            num_rows = cache.num_rows_to_run + run.data.num_rows
            if num_rows > self._budget and (may_cut or not self._runs_alone(branch)):
                return False
        return cache.schedule(branch, run.key, run.data)

    def _runs_alone(self, branch: Branch) -> bool:
        """Whether all inputs of the step are held by this branch."""
        return self.cache.scheduled_keys() <= self.cache.keys_held_by(branch)

    # ---- a plan is complete ----

    def settle(self, branch: Branch) -> None:
        """Ends the holds of a branch, but for that on an image of which it has computed a part: what it has read is in
        its keys and values."""
        position, keep = branch.num_computed_tokens, None
        if position < branch.media_end:
            inside = (run.key for run in branch.request.media if run.start < position < run.end)
            keep = next(inside, None)
        self.cache.release(branch, keep)

    def write(self, plan: SchedulerOutput) -> int:
        """Writes down what runs in a plan, and what the runner drops before. Returns the number of encoder runs."""
        plan.scheduled_encoder_inputs = self.cache.take_scheduled()
        if not plan.is_void:  # a plan with nothing else is not made for it
            plan.free_encoder_mm_hashes = self.cache.take_freed()
        return sum(media.modality != EMBEDS for media in plan.scheduled_encoder_inputs.values())

    def check(self, branches: Iterable[Branch]) -> None:
        """Raise AssertionError unless, between plans, branches hold exactly the images that they are in the middle of.
        Slow: for tests."""
        self.cache.check()
        assert not self.cache.scheduled_keys(), "an input is left that no plan has"
        num_held = 0
        for branch in branches:
            position = branch.num_computed_tokens
            inside = {run.key for run in branch.request.media if run.start < position < run.end}
            held = self.cache.keys_held_by(branch)
            assert held <= inside, f"{branch.branch_id} holds what it does not read"
            assert not held or branch.status == BranchStatus.RUNNING, f"{branch.branch_id} holds media and waits"
            num_held += bool(held)
        assert num_held == self.cache.num_holders, "media are held by a branch that is gone"
