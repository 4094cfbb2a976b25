"""Drafts behind the tokens of a step: which rows the drafter runs over, and how far it goes on.

Behind a step the drafter runs over the tokens that the step has computed, so that its keys and values reach as far as
the model's: in the same blocks, which forks, prefix hits, swaps and continuations carry along. The tokens that were
sampled are known then, so rows of drafts that were not kept do not run. Behind branches that draft it goes on, one
token of each in a pass, in slots behind their ends, which the next step writes anew. A draft changes no result, unless
drafts are accepted by rejection sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.execution.drafting.drawn import DrawnDrafts
from ratoon.execution.drafting.interface import Choose, Drafter, PassOfDrafts
from ratoon.execution.inputs.batch_rows import SpanRows, StepBatch
from ratoon.execution.inputs.buffers import HostCopy, indices_on
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.passes.ends import EndRows
from ratoon.execution.readers.interface import Finish, RowReader, StepLayout

Tensor = torch.Tensor


@dataclass(slots=True)
class DraftedStep:
    """What is known of a step before its results are read."""

    batch: StepBatch
    spans: SpanRows
    lengths: np.ndarray  # [B] tokens to draft behind each branch, at most
    num_tokens: np.ndarray  # [B] that each branch had
    states: Tensor | None = None  # [layers, T, H] of all rows of branches and spans, if the drafter reads them


class Drafting:
    """Called by the runner: `readers` before a step, `begin` when it is launched, `after_step` behind its results."""

    def __init__(
        self,
        drafter: Drafter,
        branches: InputBatch,
        table: int,
        token_memory: Tensor | None = None,
        drawn: DrawnDrafts | None = None,
    ) -> None:
        """`table`: the KV group in whose blocks the drafter's keys and values lie. `token_memory`: that of the
        branches, where it lies on the device. `drawn`: draws the drafts; None: they are the likeliest tokens."""
        self.drafter = drafter
        self._branches = branches
        self._table = table
        self._block_size = int(branches.block_sizes[table])
        self._token_memory = token_memory
        self._drawn = drawn
        self._step: DraftedStep | None = None

    def begin(self, plan: SchedulerOutput, batch: StepBatch, spans: SpanRows) -> None:
        lengths = np.array([plan.draft_lengths.get(req_id, 0) for req_id in batch.ids], np.int64)
        num_tokens = self._branches.num_tokens[batch.rows[: len(batch.ids)]]
        self._step = DraftedStep(batch, spans, lengths, num_tokens)

    def readers(self, plan: SchedulerOutput, layout: StepLayout, output: ModelRunnerOutput) -> Sequence[RowReader]:
        """A source of readers: of the states that the drafter reads."""
        if self.drafter.reads is None:
            return ()
        assert self._step is not None
        rows = _rows_of(self._step)
        return [StatesReader(EndRows(self.drafter.reads, rows), self._step)] if len(rows) else ()

    def after_step(self, output: ModelRunnerOutput) -> Finish | None:
        """Run behind the step whose results have been read. Drafts go into the output, on a device by what is
        returned."""
        step, self._step = self._step, None
        if step is None:
            return None
        branches, lag = self._branches, self.drafter.lag
        num_branches = len(step.batch.ids)
        rows, num_scheduled = step.batch.rows[:num_branches], step.batch.num_scheduled[:num_branches]
        first, now = branches.num_computed[rows], branches.num_tokens[rows]
        lengths = self._lengths(step, rows, first + num_scheduled, now)
        ends = np.where(lengths > 0, now - lag, np.minimum(first + num_scheduled, now - lag))
        counts = np.maximum(ends - first, 0)
        drafting = np.flatnonzero(lengths)
        saved = branches.num_computed[rows]
        try:
            found = self._run(step, rows, counts, drafting, lengths[drafting], now[drafting])
        finally:
            branches.num_computed[rows] = saved
        if not found:
            return None
        ids = [step.batch.ids[place] for place in drafting]
        tokens = torch.cat([tokens for _, tokens in found])
        places = np.concatenate([places for places, _ in found])
        if tokens.device.type == "cpu":
            _put(ids, places, tokens.tolist(), output)
            return None
        return partial(_put_later, ids, places, HostCopy(tokens))

    def _lengths(self, step: DraftedStep, rows: np.ndarray, computed: np.ndarray, now: np.ndarray) -> np.ndarray:
        """[B] how many tokens are drafted: none behind a branch without a new token, or with tokens that this step has
        not computed, and no more than there are slots for. The last draft needs none."""
        branches = self._branches
        num_slots = branches.num_blocks[self._table, rows] * self._block_size
        room = np.minimum(num_slots + 1 + self.drafter.lag, branches.max_model_len) - now
        may_draft = (now > step.num_tokens) & (computed + 1 >= now)
        return np.where(may_draft, np.clip(step.lengths, 0, np.maximum(room, 0)), 0)

    def _run(
        self,
        step: DraftedStep,
        rows: np.ndarray,
        counts: np.ndarray,
        drafting: np.ndarray,
        lengths: np.ndarray,
        now: np.ndarray,
    ) -> list[tuple[np.ndarray, Tensor]]:
        """Returns tokens, each with the places of their branches among those that draft."""
        branches, drafter = self._branches, self.drafter
        one, of_step = self._first_pass(step, rows, counts, drafting)
        if not len(one.rows):
            return []
        states = None
        if step.states is not None:
            states = step.states[:, indices_on(step.states.device, of_step.tolist())]
        own = rows[drafting]
        places = np.arange(len(own))
        ids = [step.batch.ids[place] for place in drafting]
        if self._drawn is not None:
            self._drawn.begin()
        tokens, states = drafter.run(one, states, self._chooser(ids, own, places, 0))
        found = [(places, tokens)] if len(own) else []
        for number in range(1, int(lengths.max(initial=0))):
            still = np.flatnonzero(lengths[places] > number)
            if len(still) < len(places):
                kept = indices_on(tokens.device, still.tolist())
                tokens, states = tokens[kept], None if states is None else states[kept]
                places = places[still]
            end = now[places] + number - 1  # where the last draft goes
            self._write(own[places], end, tokens)
            branches.num_computed[own[places]] = end - drafter.lag
            one = PassOfDrafts(own[places], np.ones(len(places), np.int64), np.arange(len(places)))
            tokens, states = drafter.run(one, states, self._chooser(ids, own, places, number))
            found.append((places, tokens))
        return found

    def _chooser(self, ids: list[str], own: np.ndarray, places: np.ndarray, number: int) -> Choose | None:
        """Chooses draft `number` of the branches at these places. None: the likeliest tokens."""
        if self._drawn is None:
            return None
        return partial(self._drawn.draw, ids=[ids[place] for place in places.tolist()], rows=own[places], number=number)

    def _first_pass(
        self, step: DraftedStep, rows: np.ndarray, counts: np.ndarray, drafting: np.ndarray
    ) -> tuple[PassOfDrafts, np.ndarray]:
        """The pass over what the step has computed; and of its tokens, the places among those of the step's branches
        and spans."""
        batch, spans, num_branches = step.batch, step.spans, len(step.batch.ids)
        starts = (batch.cu_num_tokens - batch.num_scheduled)[:num_branches]
        if spans.counts:  # where texts are read that no request has generated
            of_spans = np.array(spans.counts, np.int64)
            behind = (starts[-1] + batch.num_scheduled[num_branches - 1]) if num_branches else 0
            starts = np.concatenate([starts, behind + of_spans.cumsum() - of_spans])
            # The token behind a span is not known here.
            of_spans = np.where(spans.written, of_spans - self.drafter.lag, 0)
            rows, counts = np.concatenate([rows, spans.rows]), np.concatenate([counts, of_spans])
        runs = np.flatnonzero(counts)
        ends = counts.cumsum()
        of_step = np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)
        return PassOfDrafts(rows[runs], counts[runs], ends[drafting] - 1), of_step

    def _write(self, rows: np.ndarray, positions: np.ndarray, tokens: Tensor) -> None:
        """Write drafts behind the tokens of rows, for the passes behind this one."""
        tokens = tokens.clamp(min=0)
        if self._token_memory is None:
            self._branches.token_ids[rows, positions] = tokens.cpu().numpy()
            return
        cells = rows * self._branches.max_model_len + positions
        self._token_memory.index_copy_(0, indices_on(tokens.device, cells.tolist()), tokens.to(torch.int32))


class StatesReader:
    """Keeps the states that the drafter reads until the tokens of the step are known."""

    def __init__(self, wanted: EndRows, step: DraftedStep) -> None:
        self.wanted = wanted
        self._step = step

    def read(self, states: Tensor, output: ModelRunnerOutput) -> None:
        self._step.states = states


def _rows_of(step: DraftedStep) -> np.ndarray:
    """The rows of a step's batch that belong to branches and spans; beams lie between them."""
    cu_num_tokens, num_branches = step.batch.cu_num_tokens, len(step.batch.ids)
    of_branches = np.arange(int(cu_num_tokens[num_branches - 1]) if num_branches else 0)
    num_of_spans, end = sum(step.spans.counts), int(cu_num_tokens[-1])
    return np.concatenate([of_branches, np.arange(end - num_of_spans, end)])


def _put_later(ids: list[str], places: np.ndarray, copy: HostCopy, output: ModelRunnerOutput) -> None:
    _put(ids, places, copy.to_tensor().tolist(), output)


def _put(ids: list[str], places: np.ndarray, tokens: list[int], output: ModelRunnerOutput) -> None:
    """Drafts end before a token that could not be guessed."""
    drafts: dict[str, list[int]] = {req_id: [] for req_id in ids}
    ended: set[str] = set()
    for place, token in zip(places.tolist(), tokens):
        req_id = ids[place]
        if token < 0:
            ended.add(req_id)
        elif req_id not in ended:
            drafts[req_id].append(token)
    output.draft_token_ids = {req_id: tokens for req_id, tokens in drafts.items() if tokens}
