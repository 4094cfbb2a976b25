"""Draft tokens for the runner: guesses at the next tokens of branches, checked by the rows that compute them.

A draw depends on the seed and the place of its token, so the tokens that are kept are those that would have been
sampled one by one. Where branches lie on the device, the program chooses the tokens of all rows, and writes each behind
its own: those behind the first that differs from its draft are not read, and are overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ratoon.core.outputs import LogprobsLists, ModelRunnerOutput
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.passes.ends import EndRows
from ratoon.execution.readers.interface import NO_TOKEN, Finish
from ratoon.execution.rules.grammar import NOT_MATCHED
from ratoon.execution.sampling.sampler import Sampler
from ratoon.execution.sampling.sampling_rows import SamplingRows
from ratoon.execution.sampling.tokens import SampledTokens
from ratoon.execution.sampling.told_runs import ToldRun


class DraftsReader:
    """Samples from all rows of branches with drafts, and keeps the tokens up to the first that is not as guessed. Waits
    for the device: the next step of a branch goes on behind the tokens that are kept."""

    def __init__(
        self,
        wanted: EndRows,
        drafts: Mapping[str, list[int]],
        branches: InputBatch,
        sampler: Sampler,
        first_spare: int,
    ) -> None:
        """`first_spare`: slots from there on are free."""
        self.wanted = wanted
        self._drafts = drafts
        self._branches = branches
        self._sampler = sampler
        self._first_spare = first_spare

    def read(self, logits: torch.Tensor, output: ModelRunnerOutput) -> None:
        branches, sampling_rows = self._branches, self._sampler.rows
        sampling_rows.read_tokens()
        own = [branches.row_of[req_id] for req_id in self._drafts]
        slots: list[int] = []
        spare = self._first_spare
        for row, tokens in zip(own, self._drafts.values()):
            slots += [row, *sampling_rows.look_ahead(row, tokens, spare)]
            spare += len(tokens)
        counts = [len(tokens) + 1 for tokens in self._drafts.values()]
        try:
            sampled = self._sampler.sample(logits, np.array(slots), branches.seeds[own].repeat(counts))
            drawn, bad, logprobs = sampled.to_numpy().tolist(), set(sampled.bad_rows), sampled.logprobs_lists()
        finally:
            for slot in range(self._first_spare, spare):
                sampling_rows.remove(slot)
        first = 0
        for (req_id, tokens), row, count in zip(self._drafts.items(), own, counts):
            kept = _kept_tokens(drawn[first : first + count], tokens, bad, first)
            if kept:
                branches.append_run(row, kept)
                sampling_rows.append_run(row, kept)
                output.req_ids.append(req_id)
                output.sampled_token_ids.append(kept)
            else:
                self._put_end(req_id, row, output)
            if kept and first in logprobs:
                output.logprobs[req_id] = _join([logprobs[place] for place in range(first, first + len(kept))])
            first += count
        sampling_rows.fill_ahead()

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


def _kept_tokens(drawn: list[int], drafts: list[int], bad: set[int], first: int) -> list[int]:
    """Those up to the first that differs from its draft. `bad`: rows without a token; `first`: that of the first."""
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
