"""Draft tokens for the runner: guesses at the next tokens of branches, checked by the rows that compute them.

A draw depends on the seed and the place of its token, so the tokens that are kept are those that would have been
sampled one by one. Where branches lie on the device, the program chooses the tokens of all rows, and writes each behind
its own: those behind the first that differs from its draft are not read, and are overwritten.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ratoon.core.outputs import LogprobsLists, ModelRunnerOutput
from ratoon.execution.drafting.drawn import DrawnDrafts
from ratoon.execution.inputs.cells import to_device
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.passes.ends import EndRows
from ratoon.execution.readers.interface import NO_TOKEN, Finish
from ratoon.execution.rules.grammar import NOT_MATCHED
from ratoon.execution.sampling.sampler import Sampler
from ratoon.execution.sampling.sampling_rows import SamplingRows
from ratoon.execution.sampling.tokens import SampledTokens
from ratoon.execution.sampling.told_runs import ToldRun


@dataclass(slots=True)
class CheckedBranch:
    """A branch whose drafts are sampled from: its row, where its rows begin among those of the reader, and the slots
    behind each of its drafts."""

    req_id: str
    row: int
    drafts: list[int]
    first_row: int
    spare: list[int]

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + len(self.drafts) + 1)


class DraftsReader:
    """Samples from all rows of branches with drafts, and keeps the tokens up to the first that is not as guessed. Waits
    for the device: the next step of a branch goes on behind the tokens that are kept.

    Where a grammar leaves no choice, the tokens that it forces take the place of drafts (`jumps`), as they do in steps
    without drafts."""

    def __init__(
        self,
        wanted: EndRows,
        drafts: Mapping[str, list[int]],
        branches: InputBatch,
        sampler: Sampler,
        first_spare: int,
        jumps: bool = False,
        drawn: DrawnDrafts | None = None,
        drawn_ids: Collection[str] = (),
    ) -> None:
        """`first_spare`: slots from there on are free. `jumps`: see SampledReaders. `drawn`: knows how the drafts of
        the branches `drawn_ids` were drawn."""
        self.wanted = wanted
        self._drafts = drafts
        self._branches = branches
        self._sampler = sampler
        self._first_spare = first_spare
        self._jumps = jumps
        self._drawn = drawn
        self._drawn_ids = drawn_ids

    def read(self, logits: torch.Tensor, output: ModelRunnerOutput) -> None:
        sampling_rows = self._sampler.rows
        sampling_rows.read_tokens()
        checked = self._look_ahead(output)
        if checked:
            try:
                self._check(logits, checked, output)
            finally:
                for slot in range(self._first_spare, checked[-1].spare[-1] + 1):
                    sampling_rows.remove(slot)
        sampling_rows.fill_ahead()

    def _look_ahead(self, output: ModelRunnerOutput) -> list[CheckedBranch]:
        """The branches that are sampled. Those with forced tokens get them instead."""
        branches, sampling_rows = self._branches, self._sampler.rows
        found: list[CheckedBranch] = []
        first_row, spare = 0, self._first_spare
        for req_id, drafts in self._drafts.items():
            row = branches.row_of[req_id]
            forced = self._take_forced(row) if self._jumps else []
            if forced:
                output.req_ids.append(req_id)
                output.sampled_token_ids.append(forced)
            else:
                slots = sampling_rows.look_ahead(row, drafts, spare)
                found.append(CheckedBranch(req_id, row, drafts, first_row, slots))
                spare += len(drafts)
            first_row += len(drafts) + 1
        return found

    def _take_forced(self, row: int) -> list[int]:
        sampling_rows = self._sampler.rows
        for grammar in sampling_rows.grammars_of(np.array([row])).values():
            grammar.wait_or_fill()
            if grammar.problem is not None:
                return []
        forced = sampling_rows.take_forced(row, self._branches.room_of(row))
        if forced:
            self._branches.append_run(row, forced)
        return forced

    def _check(self, logits: torch.Tensor, checked: list[CheckedBranch], output: ModelRunnerOutput) -> None:
        branches, sampling_rows = self._branches, self._sampler.rows
        if len(checked) < len(self._drafts):
            logits = logits[to_device(np.array([row for each in checked for row in each.rows]), logits.device)]
        own, counts = [each.row for each in checked], [len(each.rows) for each in checked]
        slots = np.array([slot for each in checked for slot in (each.row, *each.spare)])
        drafts = np.array([draft for each in checked for draft in (*each.drafts, -1)])
        proposed = None if self._drawn is None else self._distributions(self._drawn, checked, drafts)
        sampled = self._sampler.sample_beside(logits, slots, branches.seeds[own].repeat(counts), drafts, proposed)
        drawn, bad, logprobs = sampled.to_numpy().tolist(), set(sampled.bad_rows), sampled.logprobs_lists()
        first = 0
        for each in checked:
            kept = _kept_tokens(drawn[first : first + len(each.rows)], each.drafts, bad, first)
            if kept and first in logprobs:
                output.logprobs[each.req_id] = _join([logprobs[place] for place in range(first, first + len(kept))])
            first += len(each.rows)
            if not kept:
                self._put_end(each.req_id, each.row, output)
                continue
            if self._jumps:
                kept = self._with_forced(each, kept)
            branches.append_run(each.row, kept)
            sampling_rows.append_run(each.row, kept)
            output.req_ids.append(each.req_id)
            output.sampled_token_ids.append(kept)

    def _distributions(
        self, drawn: DrawnDrafts, checked: list[CheckedBranch], drafts: np.ndarray
    ) -> dict[int, torch.Tensor]:
        """Returns the distributions that drafts were drawn from, by row. Drafts of which that is lost are taken out of
        `drafts`: their rows are drawn on their own."""
        found: dict[int, torch.Tensor] = {}
        first = 0
        for each in checked:
            if each.req_id in self._drawn_ids:
                distributions = drawn.take(each.req_id, int(self._branches.num_tokens[each.row]))
                if distributions is None:
                    drafts[first : first + len(each.drafts)] = -1
                else:  # which are more, if there was no room for all drafts
                    found.update(zip(range(first, first + len(each.drafts)), distributions))
            first += len(each.rows)
        return found

    def _with_forced(self, each: CheckedBranch, kept: list[int]) -> list[int]:
        """The tokens up to the first behind which others are forced, and these."""
        room = self._branches.room_of(each.row)
        for count, (token, draft, slot) in enumerate(zip(kept, each.drafts, each.spare), start=1):
            if token != draft:
                break
            forced = self._sampler.rows.forced_in(slot, room - count)
            if forced:
                return kept[:count] + forced
        return kept

    def _put_end(self, req_id: str, row: int, output: ModelRunnerOutput) -> None:
        """A branch without a token: its grammar is complete or allows none, or its logits can't be used."""
        grammar = self._sampler.rows.grammars_of(np.array([row])).get(0)
        if grammar is None or grammar.mask().any():
            output.errors[req_id] = NO_TOKEN
        elif grammar.problem is None and grammar.is_complete:
            output.completed.append(req_id)
        else:
            output.refused[req_id] = grammar.problem or NOT_MATCHED


@dataclass(slots=True)
class CheckedTokensReader:
    """Reads tokens that the program has chosen for all rows of branches with drafts, and for the last one of others,
    which come first. Waits for nothing: what is kept of drafts is appended to the rows when the next step begins."""

    wanted: EndRows
    ids: list[str]
    rows: np.ndarray  # of the branches
    drafts: Sequence[list[int]]  # of each branch
    num_without: int  # branches without drafts
    branches: InputBatch
    sampling_rows: SamplingRows

    def read(self, tokens: torch.Tensor, output: ModelRunnerOutput) -> Finish:
        sampled = SampledTokens(tokens)
        sampled.start_copy()
        without = self.rows[: self.num_without]
        if len(without):
            self.branches.append_pending(without)
            self.sampling_rows.append_unread(without, sampled)
        runs = [self.sampling_rows.expect_run(row) for row in self.rows[self.num_without :].tolist()]
        return partial(self._put, sampled, runs)

    def _put(self, sampled: SampledTokens, runs: list[ToldRun], output: ModelRunnerOutput) -> None:
        drawn, bad = sampled.to_numpy().tolist(), set(sampled.bad_rows)
        first = 0
        for place, (req_id, drafts) in enumerate(zip(self.ids, self.drafts)):
            kept = _kept_tokens(drawn[first : first + len(drafts) + 1], drafts, bad, first)
            first += len(drafts) + 1
            if not kept:
                output.errors[req_id] = NO_TOKEN
                continue
            output.req_ids.append(req_id)
            output.sampled_token_ids.append(kept)
            if place >= self.num_without:
                self.sampling_rows.tell(runs[place - self.num_without], kept)


@dataclass(slots=True)
class HostCheckedTokensReader:
    """Reads tokens that the program has chosen for all rows of branches, with drafts or without, where rows are on the
    host. Each branch asks for its likeliest tokens alone."""

    wanted: EndRows
    ids: list[str]
    rows: np.ndarray  # of the branches
    drafts: Sequence[list[int]]  # of each branch
    branches: InputBatch
    sampling_rows: SamplingRows

    def read(self, tokens: SampledTokens, output: ModelRunnerOutput) -> None:
        drawn, bad = tokens.to_numpy().tolist(), set(tokens.bad_rows)
        first = 0
        for req_id, row, drafts in zip(self.ids, self.rows.tolist(), self.drafts):
            kept = _kept_tokens(drawn[first : first + len(drafts) + 1], drafts, bad, first)
            first += len(drafts) + 1
            if not kept:
                output.errors[req_id] = NO_TOKEN
                continue
            self.branches.append_run(row, kept)
            self.sampling_rows.append_run(row, kept)
            output.req_ids.append(req_id)
            output.sampled_token_ids.append(kept)


def _kept_tokens(drawn: list[int], drafts: list[int], bad: set[int], first: int) -> list[int]:
    """Returns the drawn tokens up to the first that differs from its draft. `bad`: rows without a token; `first`: the
    row of the first token."""
    kept: list[int] = []
    for place, token in enumerate(drawn):
        if first + place in bad:
            break
        kept.append(token)
        if place < len(drafts) and token != drafts[place]:
            break
    return kept


def _join(rows: list[LogprobsLists]) -> LogprobsLists:
    return LogprobsLists(
        [row.token_ids[0] for row in rows], [row.logprobs[0] for row in rows], [row.sampled_ranks[0] for row in rows]
    )
