"""Answers that are not text: a vector, or hidden states. They are complete, and sent once, when their request ends.

Each collects the engine's outputs and builds the caller's output: numpy arrays, and torch tensors for an LLM, which
share their memory. Requests themselves are in request_state.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ratoon.core.errors import EngineError, RequestError
from ratoon.core.outputs import (
    EmbeddingOutput,
    HiddenStatesOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from ratoon.core.params import PoolingParams
from ratoon.core.request import EngineCoreOutput, FinishReason
from ratoon.core.wire import WireTensor
from ratoon.engine.input.hidden_states import Selection
from ratoon.engine.output.vectors import finish_vector

if TYPE_CHECKING:
    import torch

Output: TypeAlias = RequestOutput | EmbeddingOutput | HiddenStatesOutput

ABORTED = "the request was aborted"
MANY_ROWS = 4096  # rows that are reordered immediately; more are deferred until the caller takes the output


class EndedRequest(Protocol):
    """The part of a request that an answer needs: a RequestState, once it has ended."""

    external_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int | None
    metrics: RequestMetrics
    error: str | None
    refusal: RequestError | None
    owner: str | None

    @property
    def finish_reason(self) -> FinishReason: ...


class PendingAnswer(Protocol):
    def take(self, output: EngineCoreOutput) -> None:
        """Add the output of a step."""

    def output(self, request: EndedRequest) -> EmbeddingOutput | HiddenStatesOutput:
        """The caller's output for a request that has ended. If it failed, the answer itself is None."""


class VectorAnswer:
    def __init__(self, params: PoolingParams) -> None:
        self._params = params
        self.pooled: WireTensor | None = None

    def take(self, output: EngineCoreOutput) -> None:
        if output.pooled is not None:
            self.pooled = output.pooled

    def output(self, request: EndedRequest) -> EmbeddingOutput:
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
        """`token_ids` are the tokens that positions refer to; none for audio."""
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

    def output(self, request: EndedRequest) -> HiddenStatesOutput:
        failed = request.error is not None or not self.assembly.complete
        output = HiddenStatesOutput(
            request_id=request.external_id,
            tensor=None if failed else self.assembly.take_array(),
            dtype=self._selection.extraction.dtype,
            layers=self._selection.layers,
            positions=self._selection.positions,
            token_ids=[],
            computed_tokens=self.num_rows_run,
            num_cached_tokens=request.num_cached_tokens or 0,
            source=self.source,
            metrics=request.metrics,
            error=_reason(request, "the engine did not send all rows") if failed else None,
            refusal=request.refusal,
            owner=request.owner,
        )
        arrangement = Arrangement(self._selection, self._token_ids)
        if len(self._selection.positions) * len(self._selection.layers) > MANY_ROWS:
            output.arrangement = arrangement  # slow, and other requests wait here
        else:
            arrangement.apply(output)
        return output


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Puts the states of an answer into the requested order, repetitions included."""

    selection: Selection
    token_ids: Sequence[int]  # that positions refer to; none for audio

    def apply(self, output: HiddenStatesOutput) -> None:
        output.arrangement = None
        output.token_ids = [self.token_ids[position] for position in output.positions if self.token_ids]
        if output.tensor is not None:
            output.tensor = self._arranged(output.tensor)
            if num_tokens := self.selection.extraction.lens:
                output.norms, output.lens = read_lens(output.tensor, num_tokens)
                output.tensor = None

    def _arranged(self, array: Any) -> Any:
        import numpy

        rows, layers = self.selection.row_order, self.selection.layer_order
        if rows == [*range(array.shape[1])] and layers == [*range(array.shape[0])]:
            return array
        arranged = numpy.empty((len(layers), len(rows), array.shape[2]), array.dtype)
        if self.selection.hold is not None:
            self.selection.hold.keep_for(arranged)
        places = numpy.array(rows)
        for layer, source in enumerate(layers):
            numpy.take(array[source], places, axis=0, out=arranged[layer], mode="clip")  # without Python's lock
        return arranged


def read_lens(packed: Any, num_tokens: int) -> tuple[list[list[float]], list[list[TokenLogprobs]]]:
    """Returns the norms and the most probable tokens from the numbers that stand in the place of states
    (Extraction.lens)."""
    norms, ids, logprobs = packed[..., 0], packed[..., 1 : 1 + num_tokens], packed[..., 1 + num_tokens :]
    tokens = [
        [
            {int(token): Logprob(value, rank) for rank, (token, value) in enumerate(zip(*row), 1)}
            for row in zip(of_layer, values)
        ]
        for of_layer, values in zip(ids.tolist(), logprobs.tolist())
    ]
    return norms.tolist(), tokens


def arrange(output: Output) -> None:
    """Do the deferred work for an output that a caller is about to get. It may be slow."""
    for states in states_of(output):
        if states.arrangement is not None:
            states.arrangement.apply(states)


async def arrange_beside(output: Output) -> None:
    """Arranges hidden states without blocking the event loop."""
    if any(states.arrangement is not None for states in states_of(output)):
        await asyncio.to_thread(arrange, output)


def states_of(output: Output) -> list[HiddenStatesOutput]:
    if isinstance(output, HiddenStatesOutput):
        return [output]
    return (output.hidden_states or []) if isinstance(output, RequestOutput) else []


def _reason(request: EndedRequest, otherwise: str) -> str:
    if request.error is not None:
        return request.error
    return ABORTED if request.finish_reason == FinishReason.ABORT else otherwise


class HiddenStatesAssembly:
    """Collects rows that arrive in consecutive parts into one array; after an engine's death they start from the
    first."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._array: Any = None  # [layers, rows, hidden], in the engine's order; allocated with the first part
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
                f"rows from {first_row} on, {part!r}, came after {self._num_rows} of {num_rows} rows of {num_layers} "
                f"layers in {extraction.dtype}"
            )
        # Not from `part.view()`: Python's memoryview has no float16.
        rows = numpy.frombuffer(part.data, "uint16" if part.dtype == "bfloat16" else part.dtype).reshape(part.shape)
        if self._array is None:
            self._array = numpy.empty((num_layers, num_rows, part.shape[2]), rows.dtype)
            if self._selection.hold is not None:
                self._selection.hold.keep_for(self._array)
        self._num_rows = first_row + part.shape[1]
        self._array[:, first_row : self._num_rows] = rows

    def take_array(self) -> Any:
        """Layers and rows rising, each once. To be called once: ownership passes to the caller."""
        array, self._array = self._array, None
        return array


def with_torch_tensors(output: Output) -> None:
    """Put tensors where an output has arrays of hidden states."""
    arrange(output)
    for states in states_of(output):
        if states.tensor is not None:
            states.tensor = as_torch(states.tensor, states.dtype)


def as_torch(array: Any, dtype: str) -> torch.Tensor:
    import torch

    if dtype == "bfloat16":  # which numpy does not know: there they are whole numbers
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)
