"""The program of a step: prepare, embed, layers, read, choose. There is one; drivers run it by different means.

calls.py runs it call by call, with inputs of the step's own size, graphs.py replays it as a CUDA graph,
recorded_passes.py as one native call. What it ends with is declared by the readers of the step (ends.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ratoon.execution.inputs.batch_rows import StepBatch
from ratoon.execution.inputs.columns import StepColumns, no_columns
from ratoon.execution.inputs.step_inputs import ReadRows, StepInputs
from ratoon.execution.kv.kv_tensors import LayerCaches
from ratoon.execution.passes.cross_weights import CrossWeightRows
from ratoon.execution.passes.ends import (
    FIRST_WITHOUT_STATES,
    End,
    EndRows,
    LayerRows,
    ProgramRows,
    RowColumns,
)
from ratoon.execution.passes.stages import run_stage
from ratoon.execution.passes.step_context import PagedStep
from ratoon.execution.sampling.tokens import SampledTokens
from ratoon.layers import sampling
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.sampling import Masks, Mode
from ratoon.models.base import FinalStates, LanguageModel

Tensor = torch.Tensor


@dataclass(slots=True)
class ProgramStep:
    """What a driver is given: the batch of a step, and the ends that its readers want, in the order of their ranks."""

    batch: StepBatch
    wanted: Sequence[EndRows]
    # The optional ones that it has
    columns: StepColumns = field(default_factory=no_columns)

    @property
    def num_tokens(self) -> int:
        return int(self.batch.cu_num_tokens[-1])

    @property
    def reads_all(self) -> bool:
        """Whether one end reads all rows of the batch, in their order."""
        if len(self.wanted) != 1:
            return False
        rows, num_tokens = self.wanted[0].rows, self.num_tokens
        if len(rows) != num_tokens:
            return False
        return num_tokens == 1 or bool((rows == np.arange(num_tokens)).all())

    @property
    def only_by_calls(self) -> bool:
        """Whether neither a graph nor a recorded pass can run it."""
        return any(each.end.only_by_calls for each in self.wanted)

    @property
    def num_layers(self) -> int | None:
        """Layers behind which nothing is needed of the step. None: all are."""
        unwritten = self.batch.unwritten
        if unwritten is None or not unwritten.all():
            return None
        ends = [each.end for each in self.wanted]
        return None if any(end.rank < FIRST_WITHOUT_STATES for end in ends) else _last_inner(ends)


def _last_inner(ends: Sequence[End]) -> int:
    return max((max(end.inner_layers) for end in ends), default=0)


class ProgramEnds(NamedTuple):
    """The ends of a program and the places of their rows among those that are read."""

    ends: Sequence[End]
    places: Sequence[slice]

    @classmethod
    def of(cls, ends: Sequence[End], counts: Sequence[int]) -> ProgramEnds:
        places, stop = [], 0
        for count in counts:
            start, stop = stop, stop + count
            places.append(slice(start, stop))
        return cls(ends, places)

    @property
    def num_with_states(self) -> int:
        """Rows that have final states: they come first."""
        return max((place.stop for end, place in self.pairs if end.rank < FIRST_WITHOUT_STATES), default=0)

    @property
    def num_with_logits(self) -> int:
        return max((place.stop for end, place in self.pairs if end.needs_logits), default=0)

    @property
    def pairs(self) -> Iterator[tuple[End, slice]]:
        return zip(self.ends, self.places)


class StepProgram:
    """The program of a model over its paged cache."""

    def __init__(self, model: LanguageModel, kv: LayerCaches) -> None:
        self.model = model
        self.kv = kv

    def run(
        self,
        inputs: StepInputs,
        ends: ProgramEnds,
        rows: Tensor | None,
        columns: Sequence[RowColumns],
        num_layers: int | None = None,
        read: ReadRows | None = None,
        weights: CrossWeightRows | None = None,
    ) -> list[Any]:
        """`rows`: those that are read, of all ends; None: all rows of the step, for one end. `columns`: of each end.
        `num_layers`: the program ends after so many, if no row has a final state. `weights`: of cross-attention, for
        ends that read them. Returns what each end computes; nothing on a stage that hands its rows on: the last one has
        the ends."""
        kv = self.kv
        metadata = [backend.build_metadata(group) for backend, group in zip(kv.backends, inputs.groups)]
        cross = None if inputs.cross is None else kv.cross_backend.build_metadata(inputs.cross)
        adapters = inputs.adapters
        step = PagedStep(kv, metadata, cross, read, adapters=adapters, weights=weights)
        observer = self._observer(ends, rows, inputs)
        with_states = None if rows is None else rows[: ends.num_with_states]
        states = run_stage(self.model, inputs, step, with_states, observer, num_layers)
        if states is None:
            return []
        if weights is not None:
            weights.add_up()
        if adapters is not None and rows is not None:
            adapters = adapters.select(rows)
        return self.finish(states, ends, columns, observer, adapters, weights)

    def finish(
        self,
        states: FinalStates,
        ends: ProgramEnds,
        columns: Sequence[RowColumns],
        observer: LayerRows | None = None,
        adapters: AdapterRows | None = None,
        weights: CrossWeightRows | None = None,
    ) -> list[Any]:
        """The ends of a program whose final states are there. `adapters`: of the rows that are read."""
        count = ends.num_with_logits
        logits = None
        if count:
            normed = states.normed if count == len(states.normed) else states.normed[:count]
            if adapters is not None and count < len(adapters.slots):
                adapters = adapters.select(slice(0, count))
            logits = self.model.compute_logits(normed, adapters)
        results = []
        for index, (end, place) in enumerate(ends.pairs):
            rows = ProgramRows(
                states if len(ends.ends) == 1 else states.select(place),
                logits if logits is None or not end.needs_logits or len(ends.ends) == 1 else logits[place],
                {} if observer is None else observer.found[index],
                columns[index],
            )
            if weights is not None:
                rows.cross_weights = weights.found[index]
            results.append(end.run(rows))
        return results

    @staticmethod
    def _observer(ends: ProgramEnds, rows: Tensor | None, inputs: StepInputs) -> LayerRows | None:
        if not any(end.inner_layers for end in ends.ends):
            return None
        if rows is None:
            rows = torch.arange(len(inputs.input_ids), device=inputs.input_ids.device)
        return LayerRows([(end.inner_layers, rows[place]) for end, place in ends.pairs])


class Driver(Protocol):
    """A way to run the program."""

    @property
    def has_prepared(self) -> bool:
        """Whether the latest step took longer than the next ones like it will."""
        ...

    def run(self, step: ProgramStep) -> list[Any] | None:
        """What each end of the step computes; for MaskedTokens a function that chooses the tokens, to be called once
        the masks are on their way. None: it can't run this step, and has done nothing."""
        ...


class HostColumns:
    """Where branches lie on the host: their tokens are appended by the reader."""

    def __getitem__(self, name: str) -> Tensor:
        raise KeyError(name)

    def choose_tokens(self, logits: Tensor, mode: Mode, masks: Masks | None = None) -> SampledTokens:
        assert mode is Mode.GREEDY and masks is None, "what else a request asks for is the sampler's"
        # A call that does nothing would keep a pass from being recorded.
        return SampledTokens.of(sampling.greedy(logits if logits.dtype is torch.float32 else logits.float()))


HOST_COLUMNS = HostColumns()
