"""Answers that are no text: a vector, or hidden states. They come whole, once, when their request ends.

Each takes in what the engine sends for it, and makes what the caller gets. Requests themselves are in request_state.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ratoon.core.errors import EngineError
from ratoon.core.outputs import EmbeddingOutput, HiddenStatesOutput
from ratoon.core.params import PoolingParams
from ratoon.core.request import EngineCoreOutput, FinishReason
from ratoon.core.wire import WireTensor
from ratoon.engine.hidden_states import Selection
from ratoon.engine.vectors import finish_vector

if TYPE_CHECKING:
    from ratoon.engine.request_state import RequestState

ABORTED = "the request was aborted"


class Answer(Protocol):
    def take(self, output: EngineCoreOutput) -> None:
        """Take in what a step brought."""

    def output(self, request: RequestState) -> EmbeddingOutput | HiddenStatesOutput:
        """What the caller gets for a request that has ended. If it failed, the answer itself is None."""


class VectorAnswer:
    def __init__(self, params: PoolingParams) -> None:
        self._params = params
        self.pooled: WireTensor | None = None

    def take(self, output: EngineCoreOutput) -> None:
        if output.pooled is not None:
            self.pooled = output.pooled

    def output(self, request: RequestState) -> EmbeddingOutput:
        pooled = self.pooled if request.error is None else None
        return EmbeddingOutput(
            request_id=request.external_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            embedding=None if pooled is None else finish_vector(pooled, self._params),
            num_cached_tokens=request.num_cached_tokens or 0,
            metrics=request.metrics,
            error=_reason(request, "the engine sent no vector") if pooled is None else None,
            refusal=request.refusal,
            owner=request.owner,
        )


class HiddenStatesAnswer:
    def __init__(self, selection: Selection, token_ids: Sequence[int]) -> None:
        """`token_ids` are what the positions count in; none: it is audio."""
        self._selection = selection
        self._token_ids = token_ids
        self.assembly = HiddenStatesAssembly(selection)
        self.source: str | None = None
        self.num_rows_run = 0

    def take(self, output: EngineCoreOutput) -> None:
        if output.hidden_states is not None:
            self.assembly.add(output.hidden_states, output.first_row)
            self.num_rows_run = output.num_rows_run
        if output.inherited_from is not None:
            self.source = str(output.inherited_from)

    def output(self, request: RequestState) -> HiddenStatesOutput:
        failed = request.error is not None or not self.assembly.complete
        return HiddenStatesOutput(
            request_id=request.external_id,
            tensor=None if failed else self.assembly.array(),
            dtype=self._selection.extraction.dtype,
            layers=self._selection.layers,
            positions=self._selection.positions,
            token_ids=[self._token_ids[position] for position in self._selection.positions if self._token_ids],
            computed_tokens=self.num_rows_run,
            num_cached_tokens=request.num_cached_tokens or 0,
            source=self.source,
            metrics=request.metrics,
            error=_reason(request, "the engine did not send all rows") if failed else None,
            refusal=request.refusal,
            owner=request.owner,
        )


def _reason(request: RequestState, otherwise: str) -> str:
    if request.error is not None:
        return request.error
    return ABORTED if request.choices[0].finish_reason == FinishReason.ABORT else otherwise


class HiddenStatesAssembly:
    """Rows that come in parts, one behind the other, into one array; after an engine's death from the first again."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._array: Any = None  # [layers, rows, hidden], as the engine counts them; made when the first part comes
        self._num_rows = 0

    @property
    def complete(self) -> bool:
        return self._num_rows == len(self._selection.extraction.positions)

    def add(self, part: WireTensor, first_row: int) -> None:
        import numpy  # here, because most front ends never see hidden states

        extraction = self._selection.extraction
        num_layers, num_rows = len(extraction.layers), len(extraction.positions)
        fits = len(part.shape) == 3 and part.shape[0] == num_layers and part.dtype == extraction.dtype
        if not fits or not 0 <= first_row <= self._num_rows or first_row + part.shape[1] > num_rows:
            raise EngineError(
                f"rows from {first_row} on, {part!r}, came behind {self._num_rows} of {num_rows} rows of {num_layers} "
                f"layers in {extraction.dtype}"
            )
        # Not from `part.view()`: Python's memoryview has no float16.
        rows = numpy.frombuffer(part.data, "uint16" if part.dtype == "bfloat16" else part.dtype).reshape(part.shape)
        if self._array is None:
            self._array = numpy.empty((num_layers, num_rows, part.shape[2]), rows.dtype)
        self._num_rows = first_row + part.shape[1]
        self._array[:, first_row : self._num_rows] = rows

    def array(self) -> Any:
        """Layers and rows in the order in which they were asked for. To be taken once: it is given away."""
        import numpy

        array, self._array = self._array, None
        rows, layers = self._selection.row_order, self._selection.layer_order
        if rows == [*range(array.shape[1])] and layers == [*range(array.shape[0])]:
            return array
        return numpy.ascontiguousarray(array[numpy.ix_(layers, rows)])
