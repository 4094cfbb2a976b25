"""Sampled rows for the runner: the newest row of every branch that gets a token, and the tokens of their fan-outs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ratoon.core.outputs import LogprobsLists, ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.execution.cells import to_device
from ratoon.execution.input_batch import InputBatch
from ratoon.execution.readers import Finish, StepLayout
from ratoon.execution.rules.base import RowRules
from ratoon.execution.rules.grammar import Grammar
from ratoon.execution.sampler import Sampler
from ratoon.execution.sampling_rows import SamplingRows

if TYPE_CHECKING:
    from ratoon.execution.device_inputs import DeviceRows

NO_TOKEN = "the model's logits hold no usable number (NaN or all tokens forbidden)"
NO_WAY = "the grammar allows no token: the text does not match it, or it exceeds a limit of the grammar library"


class Tokens(Protocol):
    """Tokens that were chosen, one for each draw. They may still be on their way to the host."""

    def start_copy(self) -> None:
        """Copy to the host without waiting. The methods below are called once that is done."""
        ...

    def wait(self) -> None:
        """Until it is done."""
        ...

    def to_numpy(self) -> np.ndarray: ...

    @property
    def bad_rows(self) -> list[int]: ...

    def logprobs_lists(self) -> dict[int, LogprobsLists]: ...


class SampledRowsReader:
    """`resident`: the rows on the device, if they are there. Sampled tokens then stay on the device until the next step
    is under way, unless a row's rules read them."""

    def __init__(
        self,
        plan: SchedulerOutput,
        layout: StepLayout,
        branches: InputBatch,
        sampler: Sampler,
        resident: DeviceRows | None = None,
        jumps: bool = False,
    ) -> None:
        self._plan = plan
        self._branches = branches
        self._req_ids = plan.sampled_req_ids
        self.known: list[str] = []  # those that get no token: see ModelRunnerOutput
        if jumps:
            self._leave_out_known()
        self.rows = [layout.last_row[req_id] for req_id in self._req_ids]
        self._sampler = sampler
        self._resident = resident
        self._jumps = jumps  # also append tokens without a choice

    def read_logits(self, logits: torch.Tensor, output: ModelRunnerOutput) -> Finish | None:
        num_branches = len(self._req_ids)
        ids, rows, seeds, source = self._draws()
        if len(ids) > num_branches:  # several choices from one row
            logits = logits[to_device(source, logits.device)]
        sampled = self._sampler.sample(logits, rows, seeds)
        own = rows[:num_branches]
        self._sampler.rows.append_on_device(own, sampled.token_ids)
        if self._resident is None:
            append_known(sampled, ids, rows, num_branches, self._branches, self._sampler.rows, output)
            if self._jumps:
                append_forced(ids, own, self._branches, self._sampler.rows, output)
            self._sampler.rows.fill_ahead()
            return None
        self._resident.append_tokens(own, sampled.token_ids[:num_branches])
        return append_pending(sampled, ids, rows, num_branches, self._branches, self._sampler.rows, output)

    def _leave_out_known(self) -> None:
        """The plan was made before the step ahead of it found tokens without a choice: the next token of such a branch
        is known."""
        branches, num_scheduled = self._branches, self._plan.num_scheduled_tokens
        sampled: list[str] = []
        for req_id in self._req_ids:
            row = branches.row_of[req_id]
            is_known = branches.num_computed[row] + num_scheduled[req_id] < branches.num_tokens[row]
            (self.known if is_known else sampled).append(req_id)
        self._req_ids = sampled

    def _draws(self) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
        """The branches that get a token: ids, rows, seeds, and the sampled row that each draws from.

        The sampled branches come first, in the plan's order, then the children of fan-outs.
        """
        plan, branches = self._plan, self._branches
        ids = list(self._req_ids)
        rows = [branches.row_of[req_id] for req_id in ids]
        seeds = [branches.seeds[row] for row in rows]
        source = list(range(len(ids)))
        for parent, children in plan.fanout.items():
            index = self._req_ids.index(parent)
            for child, seed in children:
                ids.append(child)
                rows.append(rows[index])
                seeds.append(np.uint64(seed))
                source.append(index)
        return ids, np.array(rows), np.array(seeds, np.uint64), np.array(source)


@dataclass(slots=True)
class SampledPass:
    """A forward pass in which every branch had one token, and whose next tokens are chosen already. As ExecutedPass."""

    tokens: Tokens
    ids: list[str]
    rows: np.ndarray
    branches: InputBatch
    sampling_rows: SamplingRows

    def read(self, output: ModelRunnerOutput) -> Finish | None:
        num_rows = len(self.rows)
        return append_pending(self.tokens, self.ids, self.rows, num_rows, self.branches, self.sampling_rows, output)


@dataclass(slots=True)
class KnownPass:
    """The same where the tokens are on the host."""

    tokens: Tokens
    ids: list[str]
    rows: np.ndarray
    branches: InputBatch
    sampling_rows: SamplingRows

    def read(self, output: ModelRunnerOutput) -> None:
        append_known(self.tokens, self.ids, self.rows, len(self.rows), self.branches, self.sampling_rows, output)


def append_pending(
    sampled: Tokens,
    ids: list[str],
    rows: np.ndarray,
    num_own: int,
    branches: InputBatch,
    sampling_rows: SamplingRows,
    output: ModelRunnerOutput,
) -> Finish | None:
    """As `append_known`, for tokens that the device has written to its rows. The host waits for them only if the rules
    of a row read them; otherwise what `Finish` does is left."""
    sampled.start_copy()
    own = rows[:num_own]
    if sampling_rows.need_tokens(own):
        sampled.wait()
        append_known(sampled, ids, rows, num_own, branches, sampling_rows, output)
        sampling_rows.fill_ahead()
        return None
    branches.append_pending(own)
    sampling_rows.append_tokens(own, np.zeros(len(own), np.int64))
    return partial(_put_tokens_later, sampled, ids)


def _put_tokens_later(sampled: Tokens, ids: list[str], output: ModelRunnerOutput) -> None:
    put_tokens(sampled, ids, output)


def append_known(
    sampled: Tokens,
    ids: list[str],
    rows: np.ndarray,
    num_own: int,
    branches: InputBatch,
    sampling_rows: SamplingRows,
    output: ModelRunnerOutput,
) -> None:
    """Put the tokens of `ids`, which were sampled from `rows`, into the output. The first `num_own` rows are those of
    their branches, and get their tokens; the others belong to the branches that these are forked from."""
    own = rows[:num_own]
    tokens = sampled.to_numpy()[:num_own]  # the only device synchronisation of a step
    bad = put_tokens(sampled, ids, output)
    if bad:
        for index in sorted(bad):
            _explain(ids[index], sampling_rows.rules[rows[index]], output)
        good = np.array([index for index in range(num_own) if index not in bad], np.int64)
        own, tokens = own[good], tokens[good]
    branches.append_tokens(own, tokens)
    sampling_rows.append_tokens(own, tokens)


def append_forced(
    ids: list[str], own: np.ndarray, branches: InputBatch, sampling_rows: SamplingRows, output: ModelRunnerOutput
) -> None:
    """Append the tokens for which a row's grammar leaves no choice. They are computed with the row's next token."""
    runs: dict[str, list[int]] = {}
    for index in sampling_rows.slots_that_read(own).tolist():
        row = own[index]
        run = sampling_rows.append_forced(int(row), branches.max_model_len - int(branches.num_tokens[row]))
        if run:
            branches.append_run(row, run)
            runs[ids[index]] = run
    if runs:
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids):
            tokens += runs.get(req_id, ())


def _explain(req_id: str, rules: RowRules, output: ModelRunnerOutput) -> None:
    """Why a branch with a grammar got no token: it is complete, or allows none."""
    grammar = next((rule for rule in rules if isinstance(rule, Grammar)), None)
    if grammar is None or (grammar.mask().any() and not grammar.is_complete):
        return
    if grammar.is_complete:
        del output.errors[req_id]
        output.completed.append(req_id)
    else:
        output.errors[req_id] = NO_WAY


def put_tokens(sampled: Tokens, ids: list[str], output: ModelRunnerOutput) -> set[int]:
    """Returns the places of those without a token."""
    tokens, bad = sampled.to_numpy().tolist(), set(sampled.bad_rows)
    if not bad:  # always, but for broken models
        output.req_ids += ids
        output.sampled_token_ids += [[token] for token in tokens]
        output.logprobs = {ids[index]: lists for index, lists in sampled.logprobs_lists().items()}
        return bad
    output.errors.update((ids[index], NO_TOKEN) for index in sorted(bad))
    good = [index for index in range(len(tokens)) if index not in bad]
    output.req_ids += [ids[index] for index in good]
    output.sampled_token_ids += [[tokens[index]] for index in good]
    output.logprobs = {ids[index]: lists for index, lists in sampled.logprobs_lists().items() if index not in bad}
    return bad
