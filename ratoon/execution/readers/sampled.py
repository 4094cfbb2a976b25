"""Sampled rows for the runner: the newest row of every branch that gets a token, and the tokens of their fan-outs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.execution.drafting.drawn import DrawnDrafts
from ratoon.execution.inputs.cells import to_device
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.passes.ends import EndRows, Logits, MaskedTokens, Tokens
from ratoon.execution.readers.drafts import CheckedTokensReader, DraftsReader, HostCheckedTokensReader
from ratoon.execution.readers.interface import NO_TOKEN, Finish, RowReader, StepLayout
from ratoon.execution.rules.grammar import NOT_MATCHED
from ratoon.execution.sampling.sampler import Sampler, all_of
from ratoon.execution.sampling.sampling_rows import MasksOfStep, Needs, SamplingRows
from ratoon.execution.sampling.tokens import SampledTokens
from ratoon.execution.sampling.told_runs import RunsOfStep
from ratoon.layers.sampling import Mode

if TYPE_CHECKING:
    from ratoon.execution.inputs.device_inputs import DeviceRows


# The same object in every step, so that the keys of graphs are compared at once
TOKENS = {mode: Tokens(mode) for mode in Mode}
MASKED_TOKENS = {mode: MaskedTokens(mode) for mode in Mode}


class SampledReaders:
    """`resident`: the rows on the device, if they are there: tokens are chosen on the device then, unless a row asks
    for more than its kernels do, and stay there until the next step is under way. `jumps`: tokens for which a grammar
    leaves no choice are appended at once: here where rows are on the host, and else as told_runs.py says.
    `waits_for_drafts`: what is kept of drafts is known once they are read, because more is drafted behind it.
    `drawn`: knows how the device has drawn drafts, for rejection sampling."""

    def __init__(
        self,
        branches: InputBatch,
        sampler: Sampler,
        resident: DeviceRows | None = None,
        jumps: bool = False,
        waits_for_drafts: bool = False,
        drawn: DrawnDrafts | None = None,
    ) -> None:
        self._branches = branches
        self._sampler = sampler
        self._resident = resident
        self._jumps = jumps
        self._first_spare = len(branches.params)  # a slot that no row has
        self._waits_for_drafts = waits_for_drafts
        self._drawn = drawn

    def readers(self, plan: SchedulerOutput, layout: StepLayout, output: ModelRunnerOutput) -> Sequence[RowReader]:
        if not plan.sampled_req_ids:
            return ()
        ids = plan.sampled_req_ids
        num_branches = len(layout.ids)
        if len(ids) == num_branches:  # all of them: in the order of the batch
            ids = layout.ids
            own, rows = layout.batch_rows[:num_branches], layout.last_rows[:num_branches]
        else:
            ids = ids.copy()
            places = [layout.place_of[req_id] for req_id in ids]
            own, rows = layout.batch_rows[places], layout.last_rows[places]
        readers: list[RowReader] = []
        drafts = plan.scheduled_spec_decode_tokens
        if drafts:
            others = [place for place, req_id in enumerate(ids) if req_id not in drafts]
            checked = None if plan.fanout else self._checked_by_program(drafts, layout, ids, own, others)
            if checked is not None:
                return [checked]
            ids, own, rows = [ids[place] for place in others], own[others], rows[others]
            checked = self._checked_by_program(drafts, layout, ids, own, [])
            readers.append(checked or self._checking_reader(drafts, layout, plan.device_drafts))
            if not ids:
                return readers
        needed = all_of(self._sampler.rows.needs[own])
        if needed & Needs.MASK:
            kept = self._leave_out_known(plan, ids, own, output)
            if kept is not None:
                ids, own, rows = [ids[place] for place in kept], own[kept], rows[kept]
        if ids:
            readers.append(self._reader_of(plan, ids, own, rows, is_plain=not needed))
        return readers

    def _checking_reader(
        self, drafts: Mapping[str, list[int]], layout: StepLayout, device_drafts: Collection[str]
    ) -> RowReader:
        last = {req_id: layout.last_row(req_id) for req_id in drafts}
        rows = [np.arange(last[req_id] - len(tokens), last[req_id] + 1) for req_id, tokens in drafts.items()]
        wanted = EndRows(Logits(), np.concatenate(rows))
        branches, sampler = self._branches, self._sampler
        return DraftsReader(
            wanted, drafts, branches, sampler, self._first_spare, self._jumps, self._drawn, device_drafts
        )

    def _checked_by_program(
        self, drafts: Mapping[str, list[int]], layout: StepLayout, ids: list[str], own: np.ndarray, others: list[int]
    ) -> RowReader | None:
        """Reads the branches with drafts, and `others` of `ids`, whose rows are `own`. None: the program can't choose
        their tokens."""
        if self._sampler.by_rejection:
            return None
        if self._resident is None:
            return self._checked_on_host(drafts, layout, [*(ids[place] for place in others), *drafts])
        return None if self._waits_for_drafts else self._checked_on_device(drafts, layout, ids, own, others)

    def _checked_on_host(self, drafts: Mapping[str, list[int]], layout: StepLayout, ids: list[str]) -> RowReader | None:
        ids.sort(key=layout.place_of.__getitem__)  # a recorded pass has all rows, in the order of the batch
        places = [layout.place_of[req_id] for req_id in ids]
        branches = layout.batch_rows[places]
        if all_of(self._sampler.rows.needs[branches]):
            return None
        of_ids = [drafts.get(req_id, []) for req_id in ids]
        rows = [np.arange(last - len(own), last + 1) for last, own in zip(layout.last_rows[places].tolist(), of_ids)]
        wanted = EndRows(TOKENS[Mode.GREEDY], np.concatenate(rows))
        return HostCheckedTokensReader(wanted, ids, branches, of_ids, self._branches, self._sampler.rows)

    def _checked_on_device(
        self, drafts: Mapping[str, list[int]], layout: StepLayout, ids: list[str], own: np.ndarray, others: list[int]
    ) -> RowReader | None:
        drafted = np.array([layout.batch_rows[layout.place_of[req_id]] for req_id in drafts])
        if all_of(self._sampler.rows.needs[drafted]) & ~(Needs.RANDOM | Needs.FILTER):
            return None
        branches, all_ids = np.concatenate([own[others], drafted]), [*(ids[place] for place in others), *drafts]
        all_drafts = [*([] for _ in others), *drafts.values()]
        counts = np.array([len(tokens) + 1 for tokens in all_drafts])
        of_branch = np.repeat(branches, counts)
        ahead = np.arange(len(of_branch)) - np.repeat(counts.cumsum() - counts, counts)
        found = self._sampler.plain_numbers(of_branch, self._branches.seeds[of_branch], ahead)
        if found is None:
            return None
        numbers, mode = found
        last_rows = layout.last_rows[[layout.place_of[req_id] for req_id in all_ids]]
        rows = np.repeat(last_rows - counts + 1, counts) + ahead
        columns = {"token_cells": self._branches.next_cells(of_branch, ahead), **numbers}
        wanted = EndRows(TOKENS[mode], rows, columns)
        return CheckedTokensReader(
            wanted, all_ids, branches, all_drafts, len(others), self._branches, self._sampler.rows
        )

    def _reader_of(
        self, plan: SchedulerOutput, ids: list[str], own: np.ndarray, rows: np.ndarray, is_plain: bool
    ) -> RowReader:
        branches, sampler = self._branches, self._sampler
        if not plan.fanout and self._resident is not None:
            seeds = branches.seeds[own]
            masked = sampler.masked_numbers(own, seeds)
            found = masked or sampler.plain_numbers(own, seeds)
            if found is not None:
                numbers, mode = found
                columns = {"token_cells": branches.next_cells(own), **numbers}
                if masked is not None:
                    wanted = EndRows(MASKED_TOKENS[mode], rows, columns)
                    return MaskedTokensReader(wanted, ids, own, branches, sampler.rows)
                return TokensReader(EndRows(TOKENS[mode], rows, columns), ids, own, branches, sampler.rows)
        elif not plan.fanout and is_plain:
            return HostTokensReader(EndRows(TOKENS[Mode.GREEDY], rows), ids, own, branches, sampler.rows)
        wanted = EndRows(Logits(), rows)
        return SampledRowsReader(wanted, ids, own, plan.fanout, branches, sampler, self._resident, self._jumps)

    def _leave_out_known(
        self, plan: SchedulerOutput, ids: list[str], own: np.ndarray, output: ModelRunnerOutput
    ) -> list[int] | None:
        """Leave out branches for which the plan was made before the result of a step ahead of it: the next token of
        one is known already, without an alternative, or the token that the step computes was not found in time.
        Returns the places of the others; None: there are no such branches."""
        num_scheduled = plan.num_scheduled_tokens
        ends = self._branches.num_computed[own] + [num_scheduled[req_id] for req_id in ids]
        num_tokens = self._branches.num_tokens[own]
        if (ends == num_tokens).all():
            return None
        output.known += [ids[place] for place in np.flatnonzero(ends < num_tokens)]
        output.late += [ids[place] for place in np.flatnonzero(ends > num_tokens)]
        return np.flatnonzero(ends == num_tokens).tolist()


class SampledRowsReader:
    """Samples from logits on the host's side, by all that a request may ask for."""

    def __init__(
        self,
        wanted: EndRows,
        ids: list[str],
        own: np.ndarray,  # rows of these branches
        fanout: Mapping[str, list[tuple[str, int]]],
        branches: InputBatch,
        sampler: Sampler,
        resident: DeviceRows | None = None,
        jumps: bool = False,
    ) -> None:
        self.wanted = wanted
        self._req_ids = ids
        self._own = own
        self._fanout = fanout
        self._branches = branches
        self._sampler = sampler
        self._resident = resident
        self._jumps = jumps
        self._complete: set[str] = set()  # those whose grammars allow an end alone, which another rule may forbid

    def read(self, logits: torch.Tensor, output: ModelRunnerOutput) -> Finish | None:
        sampling_rows = self._sampler.rows
        sampling_rows.read_tokens()
        settled = self._settle_without_sampling(output)
        if settled:
            places = [place for place, req_id in enumerate(self._req_ids) if req_id not in settled]
            if not places:
                sampling_rows.fill_ahead()
                return None
            self._req_ids, self._own = [self._req_ids[place] for place in places], self._own[places]
            logits = logits[to_device(np.array(places), logits.device)]
        num_branches = len(self._req_ids)
        ids, rows, seeds, source = self._draws()
        if len(ids) > num_branches:  # several choices from one row
            logits = logits[to_device(source, logits.device)]
        sampled = self._sampler.sample(logits, rows, seeds)
        own = rows[:num_branches]
        runs = sampling_rows.runs_of(own, with_tails=True) if sampling_rows.tells_runs else None
        sampling_rows.append_on_device(own, sampled.token_ids[:num_branches])
        if self._resident is None:
            append_known(sampled, ids, rows, num_branches, self._branches, sampling_rows, output, self._complete)
            sampling_rows.fill_ahead()
            if self._jumps:
                self._append_forced(ids, own, output)
            return None
        self._resident.append_tokens(own, sampled.token_ids[:num_branches])
        return append_pending(
            sampled, ids, rows, num_branches, self._branches, sampling_rows, output, self._complete, runs
        )

    def _settle_without_sampling(self, output: ModelRunnerOutput) -> set[str]:
        """The branches whose grammars leave nothing to sample: their text is complete, nothing matches, it must go on
        with tokens without an alternative, or what may follow is not known in time. Their results go to the output."""
        sampling_rows, rows, fanout = self._sampler.rows, self._own, self._fanout
        grammars = sampling_rows.grammars_of(rows)
        if not grammars:
            return set()
        forking = [grammar for place, grammar in grammars.items() if self._req_ids[place] in fanout]
        sampling_rows.wait_for_masks(list(grammars.values()), has_others=len(grammars) < len(rows))
        for grammar in forking:  # choices are created with this result
            grammar.wait_or_fill()
        settled: set[str] = set()
        for place, grammar in grammars.items():
            req_id = self._req_ids[place]
            ids = [req_id, *(child for child, _ in fanout.get(req_id, ()))]
            if not grammar.is_filled:
                output.late.append(req_id)
            elif grammar.problem is not None:
                output.refused.update(dict.fromkeys(ids, grammar.problem))
            elif not grammar.mask().any():
                if grammar.is_complete:
                    output.completed += ids
                else:
                    output.refused.update(dict.fromkeys(ids, NOT_MATCHED))
            elif self._jumps and self._resident is None and (run := self._take_forced(int(rows[place]))):
                output.req_ids += ids
                output.sampled_token_ids += [run.copy() for _ in ids]
            else:
                if grammar.is_complete:
                    self._complete.update(ids)
                continue
            settled.add(req_id)
        return settled

    def _append_forced(self, ids: list[str], own: np.ndarray, output: ModelRunnerOutput) -> None:
        """Append the tokens for which a row's grammar leaves no choice, if that is known soon. They are computed with
        the row's next token."""
        grammars = self._sampler.rows.grammars_of(own)
        if not grammars:
            return
        self._sampler.rows.wait_for_masks(list(grammars.values()), has_others=True)
        runs = {}
        for place, grammar in grammars.items():
            if grammar.is_filled and (run := self._take_forced(int(own[place]))):
                runs[ids[place]] = run
        if runs:
            self._sampler.rows.fill_ahead()
            for req_id, tokens in zip(output.req_ids, output.sampled_token_ids):
                tokens += runs.get(req_id, ())

    def _take_forced(self, row: int) -> list[int]:
        run = self._sampler.rows.take_forced(row, self._branches.room_of(row))
        if run:
            self._branches.append_run(row, run)
        return run

    def _draws(self) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
        """The branches that get a token: ids, rows, seeds, and the sampled row that each draws from.

        The sampled branches come first, in the plan's order, then the children of fan-outs.
        """
        ids, own = list(self._req_ids), self._own
        if not self._fanout:
            return ids, own, self._branches.seeds[own], np.arange(len(ids))
        rows, seeds, source = own.tolist(), list(self._branches.seeds[own]), list(range(len(ids)))
        place_of = {req_id: place for place, req_id in enumerate(ids)}
        for parent, children in self._fanout.items():
            if parent not in place_of:
                continue
            index = place_of[parent]
            for child, seed in children:
                ids.append(child)
                rows.append(rows[index])
                seeds.append(np.uint64(seed))
                source.append(index)
        return ids, np.array(rows), np.array(seeds, np.uint64), np.array(source)


@dataclass(slots=True)
class TokensReader:
    """Reads tokens that the program has chosen and appended to the rows on the device."""

    wanted: EndRows
    ids: list[str]
    rows: np.ndarray
    branches: InputBatch
    sampling_rows: SamplingRows

    def read(self, tokens: torch.Tensor, output: ModelRunnerOutput) -> Finish | None:
        sampled, num_rows = SampledTokens(tokens), len(self.rows)
        return append_pending(sampled, self.ids, self.rows, num_rows, self.branches, self.sampling_rows, output)


@dataclass(slots=True)
class MaskedTokensReader:
    """Reads tokens that are chosen under the masks of grammars, which are filled while the program runs."""

    wanted: EndRows
    ids: list[str]
    rows: np.ndarray
    branches: InputBatch
    sampling_rows: SamplingRows

    def read(self, choose: Callable[[], torch.Tensor], output: ModelRunnerOutput) -> Finish:
        masks = self.sampling_rows.begin_masks(self.rows)
        tokens = SampledTokens(choose())
        tokens.start_copy()
        self.branches.append_pending(self.rows)
        self.sampling_rows.append_masked(self.rows, tokens, masks)
        return partial(_put_masked, tokens, self.ids, masks)


@dataclass(slots=True)
class HostTokensReader:
    """Reads tokens that the program has chosen, where rows are on the host."""

    wanted: EndRows
    ids: list[str]
    rows: np.ndarray
    branches: InputBatch
    sampling_rows: SamplingRows

    def read(self, tokens: SampledTokens, output: ModelRunnerOutput) -> None:
        append_known(tokens, self.ids, self.rows, len(self.rows), self.branches, self.sampling_rows, output)


def _put_masked(tokens: SampledTokens, ids: list[str], masks: MasksOfStep, output: ModelRunnerOutput) -> None:
    """A row without a token has a grammar that allows none, or one that is complete."""
    assert masks.filling is not None
    masks.filling.result()
    complete: set[str] = set()
    for place in tokens.bad_rows:
        grammar = masks.grammar_of(place)
        if grammar is None or grammar.mask().any():
            continue
        if grammar.problem is None and grammar.is_complete:
            complete.add(ids[place])
        else:
            output.refused[ids[place]] = grammar.problem or NOT_MATCHED
    put_tokens(tokens, ids, output, complete, masks.runs)
    for req_id in output.refused:
        output.errors.pop(req_id, None)


def append_pending(
    sampled: SampledTokens,
    ids: list[str],
    rows: np.ndarray,
    num_own: int,
    branches: InputBatch,
    sampling_rows: SamplingRows,
    output: ModelRunnerOutput,
    complete: Collection[str] = (),
    runs: RunsOfStep | None = None,
) -> Finish | None:
    """Does what `append_known` does for tokens that the device has written to its rows. The host does not wait for
    them: the returned `Finish` puts them into the output, and with them what `runs` tells."""
    sampled.start_copy()
    own = rows[:num_own]
    branches.append_pending(own)
    sampling_rows.append_unread(own, sampled)
    return partial(_put_tokens_later, sampled, ids, complete, runs)


def _put_tokens_later(
    sampled: SampledTokens,
    ids: list[str],
    complete: Collection[str],
    runs: RunsOfStep | None,
    output: ModelRunnerOutput,
) -> None:
    put_tokens(sampled, ids, output, complete, runs)


def append_known(
    sampled: SampledTokens,
    ids: list[str],
    rows: np.ndarray,
    num_own: int,
    branches: InputBatch,
    sampling_rows: SamplingRows,
    output: ModelRunnerOutput,
    complete: Collection[str] = (),
) -> None:
    """Put the tokens of `ids`, which were sampled from `rows`, into the output. The first `num_own` rows are those of
    their branches, and get their tokens; the others belong to the branches that these are forked from."""
    own = rows[:num_own]
    tokens = sampled.to_numpy()[:num_own]  # the only device synchronisation of a step
    bad = put_tokens(sampled, ids, output, complete)
    if bad:
        good = np.array([index for index in range(num_own) if index not in bad], np.int64)
        own, tokens = own[good], tokens[good]
    branches.append_tokens(own, tokens)
    sampling_rows.append_tokens(own, tokens)


def put_tokens(
    sampled: SampledTokens,
    ids: list[str],
    output: ModelRunnerOutput,
    complete: Collection[str] = (),
    runs: RunsOfStep | None = None,
) -> set[int]:
    """Returns the places of those without a token. Of `complete`, these need none. `runs`: tells what follows some."""
    tokens, bad = sampled.to_numpy().tolist(), set(sampled.bad_rows)
    told = {} if runs is None else runs.tell(bad)
    if not bad and not told:
        output.req_ids += ids
        output.sampled_token_ids += [[token] for token in tokens]
        output.logprobs |= {ids[index]: lists for index, lists in sampled.logprobs_lists().items()}
        return bad
    without = [ids[index] for index in sorted(bad)]
    output.completed += [req_id for req_id in without if req_id in complete]
    output.errors.update((req_id, NO_TOKEN) for req_id in without if req_id not in complete)
    output.known += [ids[index] for index, tail in told.items() if tail is None]
    found = {
        index: [token, *tail]
        for index, token in enumerate(tokens)
        if index not in bad and (tail := told.get(index, ())) is not None
    }
    output.req_ids += [ids[index] for index in found]
    output.sampled_token_ids += found.values()
    output.logprobs |= {ids[index]: lists for index, lists in sampled.logprobs_lists().items() if index in found}
    return bad
