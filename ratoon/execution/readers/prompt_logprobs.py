"""Log-probabilities of prompt tokens for the runner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ratoon.core.outputs import ModelRunnerOutput, PromptLogprobsChunk
from ratoon.core.plan import SchedulerOutput
from ratoon.execution.inputs.cells import to_device
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.passes.ends import EndRows, States
from ratoon.execution.passes.program import StepProgram
from ratoon.execution.readers.interface import Finish, StepLayout
from ratoon.execution.sampling.tokens import PromptLogprobs
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.sampling import token_logprobs
from ratoon.models.base import FinalStates

ROWS_AT_ONCE = 128  # prompt rows whose logits are held at one time


@dataclass(slots=True)
class PromptSpan:
    """Consecutive rows of one branch whose next token is a prompt token with requested log-probabilities."""

    req_id: str
    row: int  # of the branch
    start: int  # prompt position of the first row
    count: int
    num_logprobs: int
    adapter_slot: int = -1


def prompt_spans(plan: SchedulerOutput, branches: InputBatch) -> Iterator[PromptSpan]:
    """Yields the span of every branch of a step that has one."""
    row_of, params_of = branches.row_of, branches.params
    for req_id, num_scheduled in plan.num_scheduled_tokens.items():
        row = row_of[req_id]
        params = params_of[row]
        if params is None or params.prompt_logprobs is None:
            continue
        start = int(branches.num_computed[row])
        # The last prompt token has no next one in the prompt.
        count = min(start + num_scheduled, int(branches.num_prompt[row]) - 1) - start
        if count > 0:
            slot = -1 if branches.adapter_slots is None else int(branches.adapter_slots[row])
            yield PromptSpan(req_id, row, start, count, params.prompt_logprobs, slot)


class PromptLogprobsReaders:
    def __init__(self, branches: InputBatch, program: StepProgram) -> None:
        self._branches = branches
        self._program = program

    def readers(
        self, plan: SchedulerOutput, layout: StepLayout, output: ModelRunnerOutput
    ) -> Sequence[PromptLogprobsReader]:
        if not self._branches.num_with_prompt_logprobs:
            return ()
        spans, rows = [], []
        for span in prompt_spans(plan, self._branches):
            first = layout.last_row(span.req_id) + 1 - plan.num_scheduled_tokens[span.req_id]
            spans.append(span)
            rows.append(np.arange(first, first + span.count))
        if not spans:
            return ()
        return (PromptLogprobsReader(spans, np.concatenate(rows), self._branches, self._program),)


class PromptLogprobsReader:
    def __init__(self, spans: list[PromptSpan], rows: np.ndarray, branches: InputBatch, program: StepProgram) -> None:
        self.wanted = EndRows(States(), rows)
        self._spans = spans
        self._branches = branches
        self._program = program

    def read(self, states: FinalStates, output: ModelRunnerOutput) -> Finish | None:
        parts = states.normed.split([span.count for span in self._spans])
        found = [(span, self._logprobs(span, part)) for span, part in zip(self._spans, parts)]

        def put(output: ModelRunnerOutput) -> None:
            for span, logprobs in found:
                output.prompt_logprobs[span.req_id] = PromptLogprobsChunk(span.start + 1, logprobs.lists())

        if states.normed.device.type == "cuda":
            return put
        put(output)
        return None

    def _logprobs(self, span: PromptSpan, states: torch.Tensor) -> PromptLogprobs:
        position = span.start + 1
        parts = []
        for part in states.split(ROWS_AT_ONCE):
            next_ids = self._branches.token_ids[span.row, position : position + len(part)].astype(np.int64)
            adapters = None
            if span.adapter_slot >= 0:
                adapters = AdapterRows(
                    torch.full((len(part),), span.adapter_slot, dtype=torch.int32, device=part.device)
                )
            logits = self._program.model.compute_logits(part, adapters)
            parts.append(token_logprobs(logits, to_device(next_ids, logits.device), span.num_logprobs))
            position += len(part)
        return PromptLogprobs(parts)
