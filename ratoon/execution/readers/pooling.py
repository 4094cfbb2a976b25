"""Pooling for the runner: which hidden states of a step are pooled, and the resulting vectors.

Hidden states come from the ordinary forward pass, after the final norm. The front end truncates and normalises the
vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import PoolingParams
from ratoon.core.plan import NewRequestData, SchedulerOutput
from ratoon.core.wire import WireTensor
from ratoon.execution.inputs.buffers import HostCopy
from ratoon.execution.passes.ends import EndRows, Logits, States
from ratoon.execution.readers.interface import Finish, StepLayout
from ratoon.models.base import FinalStates, LanguageModel

Tensor = torch.Tensor


@dataclass(slots=True)
class PooledBranch:
    """A pooling branch that the runner knows."""

    num_tokens: int
    kind: str | None  # mean, first; anything else is the last
    classify: bool = False  # what is wanted is what the model's head makes of the pooled state
    total: Tensor | None = None  # float64 [H]: for a mean, the sum over its rows so far


@dataclass(slots=True)
class PoolingSpan:
    """Consecutive rows of a step that are pooled into the vector of one branch."""

    req_id: str
    first: int  # row of the step
    count: int
    is_end: bool  # the branch's last row is among them: the vector is complete


class PoolingBranches:
    """All pooling branches that have a row. Falsy when empty, the usual case, which costs nothing."""

    def __init__(self, model: LanguageModel) -> None:
        self._branches: dict[str, PooledBranch] = {}
        self._classifier = model.classifier
        head = model.config.classifier
        self._answer_ids = None if head is None else head.token_ids

    def __len__(self) -> int:
        return len(self._branches)

    def add(self, new: NewRequestData) -> None:
        assert isinstance(new.params, PoolingParams)
        kind = new.params.pooling
        if kind in ("mean", "first") and new.num_computed_tokens:
            raise ValueError(
                f"the vector of branch {new.req_id!r} needs its first {new.num_computed_tokens} rows, which are missing"
            )
        self._branches[new.req_id] = PooledBranch(len(new.token_ids), kind, new.params.classify)

    def drop(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            self._branches.pop(req_id, None)

    def readers(
        self, plan: SchedulerOutput, layout: StepLayout, output: ModelRunnerOutput
    ) -> Sequence[PoolingReader | AnswerReader]:
        spans = self._spans(plan, layout) if self._branches else []
        found: list[PoolingReader | AnswerReader] = []
        if self._answer_ids is not None:
            answers = [span for span in spans if self._branches[span.req_id].classify]
            spans = [span for span in spans if not self._branches[span.req_id].classify]
            if answers:
                found.append(AnswerReader(answers, self._answer_ids))
        if spans:
            found.append(PoolingReader(spans, self._branches, self._classifier))
        return found

    def _spans(self, plan: SchedulerOutput, layout: StepLayout) -> list[PoolingSpan]:
        """The rows of this step that are needed: all for a mean, otherwise one."""
        ends = set(plan.pooled_req_ids)
        spans = []
        for req_id, branch in self._branches.items():
            scheduled = plan.num_scheduled_tokens.get(req_id, 0)
            is_end = req_id in ends
            if not scheduled or (branch.kind != "mean" and not is_end):
                continue
            if branch.kind == "first" and scheduled < branch.num_tokens:
                raise ValueError(f"the first row of branch {req_id!r} is not in the step of its last")
            first = layout.last_row(req_id) + 1 - (1 if branch.kind in (None, "last") else scheduled)
            spans.append(PoolingSpan(req_id, first, scheduled if branch.kind == "mean" else 1, is_end))
        return spans


class PoolingReader:
    """Reads the rows of a step that are pooled."""

    def __init__(
        self,
        spans: list[PoolingSpan],
        branches: dict[str, PooledBranch],
        classifier: Callable[[Tensor], Tensor] | None,
    ) -> None:
        rows = [row for span in spans for row in range(span.first, span.first + span.count)]
        self.wanted = EndRows(States(), np.array(rows, np.int64))
        self._spans = spans
        self._branches = branches
        self._classifier = classifier

    def read(self, states: FinalStates, output: ModelRunnerOutput) -> Finish | None:
        """Add the rows of the spans, and put the completed vectors into the output.

        A vector with a NaN or an infinite number fails its branch and no other.
        """
        due: list[str] = []
        vectors: list[Tensor] = []
        for span, rows in zip(self._spans, states.normed.split([span.count for span in self._spans])):
            branch = self._branches[span.req_id]
            if branch.kind == "mean":
                branch.total = add_rows(branch.total, rows)
            if span.is_end:
                due.append(span.req_id)
                vectors.append(rows[-1] if branch.total is None else branch.total / branch.num_tokens)
        if not due:
            return None
        matrix = torch.stack([vector.float() for vector in vectors])  # [D, H]
        classified = [place for place, req_id in enumerate(due) if self._branches[req_id].classify]
        if not classified:
            return put_when_there(due, matrix, output)
        assert self._classifier is not None, "the model has a head that classifies"
        others = [place for place in range(len(due)) if place not in set(classified)]
        logits = self._classifier(matrix[classified])  # [C, labels]
        waiting = [
            put_when_there([due[place] for place in places], rows, output)
            for places, rows in ((classified, logits), (others, matrix[others]))
            if places
        ]
        finishes = [one for one in waiting if one is not None]

        def finish_all(output: ModelRunnerOutput) -> None:
            for one in finishes:
                one(output)

        return finish_all if finishes else None


class AnswerReader:
    """Reads the logits of two tokens behind a prompt: how much more the second is the answer than the first."""

    def __init__(self, spans: list[PoolingSpan], answer_ids: tuple[int, int]) -> None:
        self.wanted = EndRows(Logits(), np.array([span.first for span in spans], np.int64))
        self._req_ids = [span.req_id for span in spans]
        self._answer_ids = answer_ids

    def read(self, logits: Tensor, output: ModelRunnerOutput) -> Finish | None:
        against, for_it = self._answer_ids
        differences = logits[:, for_it].float() - logits[:, against].float()
        return put_when_there(self._req_ids, differences[:, None], output)


def put_when_there(req_ids: list[str], matrix: Tensor, output: ModelRunnerOutput) -> Finish | None:
    """Puts rows [D, N] into the output, or returns what does so once the device has computed them."""
    if not matrix.is_cuda:
        put_vectors(req_ids, matrix.numpy(), output)
        return None
    copy = HostCopy(matrix)

    def finish(output: ModelRunnerOutput) -> None:
        put_vectors(req_ids, copy.to_numpy(), output)

    return finish


def put_vectors(req_ids: list[str], matrix: np.ndarray, output: ModelRunnerOutput) -> None:
    for req_id, vector, is_usable in zip(req_ids, matrix, np.isfinite(matrix).all(axis=1).tolist()):
        if is_usable:
            output.pooled[req_id] = WireTensor("float32", vector.shape, vector.tobytes())
        else:
            output.errors[req_id] = "the prompt's vector holds a number that is none (NaN or infinite)"


def add_rows(total: Tensor | None, rows: Tensor) -> Tensor:
    """`total` [H] and the sum of `rows` [T, H], in float64.

    On a CPU one row at a time, in token order, so that the result is bit-identical however the prompt was chunked. On
    other devices, where the states themselves depend on shapes, all at once.
    """
    if total is None:
        total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    if rows.device.type != "cpu":
        return total + rows.sum(dim=0, dtype=torch.float64)
    for row in rows.double().unbind():
        total += row
    return total
