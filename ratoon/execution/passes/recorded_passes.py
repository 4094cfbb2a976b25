"""Small steps on a CPU as recorded passes: one native call, without Python between the kernels.

A pass is recorded after a step of its shape has come before, and replayed from then on; the results are the same to
the bit. It begins with the embeddings, where kernels compute them, and ends with the final states of all rows, with
their logits, or with the tokens whose logits are largest; the stream between layers is copied on the way where an end
reads it. On a stage of a pipeline, the pass is what lies between the rows that come from the stage before and those
that go to the next one. A model whose layers use anything but kernels is not recorded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ratoon.execution.inputs.columns import TABLES, are_recorded, names_of
from ratoon.execution.inputs.step_inputs import StepInputs
from ratoon.execution.kv.kv_tensors import LayerCaches
from ratoon.execution.passes.ends import End, LayerRows, Logits, RowColumns, States, Tokens
from ratoon.execution.passes.program import HOST_COLUMNS, ProgramEnds, StepProgram
from ratoon.execution.passes.stages import begin_stage, hand_on
from ratoon.execution.passes.step_context import PagedStep
from ratoon.layers.native.recording import Arena, Program, Recording, join_recordings
from ratoon.models.base import FinalStates, LanguageModel, StreamObserver, StreamStates

logger = logging.getLogger(__name__)

MAX_TOKENS = 64  # of a step: with more, the kernels take so long that what lies between them does not matter
MAX_PASSES = 256
# Steps of a shape that run call by call before one is recorded. Recording takes as long as several replays gain, and a
# step all of whose rows are read (one token of each request, or drafts that are checked) is followed by others like it,
# while a prompt's may not be.
STEPS_BEFORE_DECODES = 1
STEPS_BEFORE_PROMPTS = 4
MAX_LOGITS_ROWS = 8  # of a pass that ends with logits: each such pass keeps memory for its own


class PassShape(NamedTuple):
    """What the arguments of kernels depend on, besides places in memory."""

    num_tokens: int
    num_reqs: int
    end: End  # for all rows
    columns: frozenset[str]  # the optional ones; with a table, the pass begins behind the embeddings
    layers: tuple[int, ...] = ()  # before which the stream is copied, rising


class PassResult(NamedTuple):
    """Holds what a pass computes, for all rows. It is valid until the next pass."""

    states: FinalStates | StreamStates  # the latter on a stage that hands its rows on
    result: Any = None  # of the shape's end; None: that was not recorded
    streams: Mapping[int, StreamStates] = {}  # by layer


Places = tuple[int, int, Mapping[str, int]]  # where ids, positions and optional columns were


class RecordedPass(NamedTuple):
    program: Program
    stream: torch.Tensor | None  # [T, H]: what the stage begins with is brought here; None: the program computes it
    places: Places
    result: PassResult
    metadata: list[Any]  # of each KV group
    cross: Any


STATES = States()


class RecordedPasses:
    def __init__(self, kv: LayerCaches) -> None:
        self._kv = kv
        self._arena = Arena()
        self._passes: dict[PassShape, RecordedPass] = {}  # in the order of their last use
        self._steps: Counter[PassShape] = Counter()  # of shapes that are not recorded
        self._is_possible = True

    @staticmethod
    def can_serve(kv: LayerCaches) -> bool:
        return all(backend.supports_recording for backend in kv.backends)

    @property
    def num_bytes(self) -> int:
        """Returns how many bytes of memory the passes keep."""
        return self._arena.num_bytes

    def __len__(self) -> int:
        return len(self._passes)

    def run(
        self,
        program: StepProgram,
        inputs: StepInputs,
        ends: ProgramEnds,
        rows: np.ndarray | None,
        columns: Sequence[RowColumns],
    ) -> list[Any] | None:
        """Does what StepProgram.run does, with `rows` on the host. None: the step has to run call by call."""
        num_tokens = len(inputs.input_ids)
        names = names_of(inputs.columns)
        if not self._is_possible or num_tokens > MAX_TOKENS or (names and not are_recorded(names)):
            return None
        layers = tuple(sorted({layer for end in ends.ends for layer in end.inner_layers}))
        end: End = STATES
        is_last = program.model.stage.is_last
        if layers and not (is_last and program.model.stage.is_first):
            return None  # rows of other stages' layers come with the stream
        if is_last and rows is None and not layers and _can_be_recorded(ends.ends[0], columns[0], num_tokens):
            end = ends.ends[0]
        shape = PassShape(num_tokens, len(inputs.cu_num_tokens), end, names, layers)
        found = self._run_shape(shape, program, inputs, reads_all=rows is None)
        if found is None:
            return None
        if found.result is not None:
            return [found.result]
        states, adapters, observer = found.states, inputs.adapters, None
        if isinstance(states, StreamStates):
            hand_on(program.model, StreamStates(states.stream.clone(), states.update))  # the next pass writes to it
            return []
        if layers:
            seen = torch.from_numpy(np.arange(num_tokens) if rows is None else rows)
            observer = LayerRows([(one.inner_layers, seen[place]) for one, place in ends.pairs])
            for layer, copied in found.streams.items():
                observer.observe(layer, copied.stream, copied.update)
        if rows is not None:
            read = torch.from_numpy(rows[: ends.num_with_states])
            states, adapters = states.select(read), None if adapters is None else adapters.select(read)
        return program.finish(states, ends, columns, observer, adapters=adapters)

    def _run_shape(
        self, shape: PassShape, program: StepProgram, inputs: StepInputs, reads_all: bool
    ) -> PassResult | None:
        recorded = self._passes.pop(shape, None)
        if recorded is not None:
            result = self._replay(recorded, program.model, inputs)
            if result is not None:
                self._passes[shape] = recorded
            return result
        is_decode = reads_all or shape.num_tokens == shape.num_reqs
        needed = STEPS_BEFORE_DECODES if is_decode else STEPS_BEFORE_PROMPTS
        if self._steps[shape] < needed:
            self._steps[shape] += 1
            return None
        return self._record(shape, program, inputs)

    def clear(self) -> None:
        """Drop all: memory that they use is about to be freed."""
        self._passes.clear()
        self._steps.clear()
        self._arena = Arena()

    def _replay(self, recorded: RecordedPass, model: LanguageModel, inputs: StepInputs) -> PassResult | None:
        kv = self._kv
        in_place = _places(inputs) == recorded.places
        for backend, metadata, group in zip(kv.backends, recorded.metadata, inputs.groups):
            in_place &= backend.update_metadata(metadata, group)
        if inputs.cross is not None:
            in_place &= kv.cross_backend.update_metadata(recorded.cross, inputs.cross)
        if not in_place:
            return None
        if recorded.stream is not None:
            recorded.stream.copy_(begin_stage(model, inputs))
        recorded.program.run()
        return recorded.result

    def _record(self, shape: PassShape, program: StepProgram, inputs: StepInputs) -> PassResult:
        model = program.model
        kv = self._kv
        metadata = [backend.build_metadata(group) for backend, group in zip(kv.backends, inputs.groups)]
        cross = None if inputs.cross is None else kv.cross_backend.build_metadata(inputs.cross)
        with Recording(self._arena) as begin:
            stream = begin_stage(model, inputs)
        # A table lies elsewhere in each step: what reads it is not recorded, and that is the beginning alone.
        has_table = not TABLES.keys().isdisjoint(shape.columns)
        begins_with_ids = model.stage.is_first and not begin.obstacles and not has_table
        if not begins_with_ids:
            brought = stream
            stream = self._arena.take(brought.nbytes).view(brought.dtype).view(brought.shape)
            stream.copy_(brought)
        step = PagedStep(kv, metadata, cross, adapters=inputs.adapters)
        copies = StreamCopies(shape.layers, self._arena)
        states: FinalStates | StreamStates
        with Recording(self._arena) as layers:
            if model.stage.is_last:
                observers = [copies] if shape.layers else []
                states = model.forward_stream(stream, inputs.rope_positions, step, None, observers)
            else:
                states = model.forward_stage(StreamStates(stream), inputs.rope_positions, step)
        result = PassResult(states, streams=copies.found)
        recordings = [begin, layers] if begins_with_ids else [layers]
        if shape.end != STATES:
            assert isinstance(states, FinalStates), "the last stage has the ends"
            with Recording(self._arena) as end:
                ends = ProgramEnds.of([shape.end], [shape.num_tokens])
                (found,) = program.finish(states, ends, [HOST_COLUMNS], adapters=inputs.adapters)
            if not end.obstacles:
                recordings.append(end)
                result = PassResult(states, found)
        joined = join_recordings(*recordings)
        if joined is None:
            self._is_possible = False
            logger.info("steps run call by call: %s can't be recorded", ", ".join(sorted(set(layers.obstacles))))
            return result
        if len(self._passes) >= MAX_PASSES:
            self._passes.pop(next(iter(self._passes)))
        embedded = None if begins_with_ids else stream
        self._passes[shape] = RecordedPass(joined, embedded, _places(inputs), result, metadata, cross)
        return result


class StreamCopies(StreamObserver):
    """Copies of the stream between layers, all rows of it, where a recorded pass keeps them."""

    def __init__(self, layers: Sequence[int], arena: Arena) -> None:
        self.num_layers_read = max(layers, default=0)
        self.found: dict[int, StreamStates] = {}  # by layer
        self._layers = layers
        self._arena = arena

    def observe(self, layer: int, stream: torch.Tensor, update: torch.Tensor | None) -> None:
        if layer in self._layers:
            self.found[layer] = StreamStates(self._copy(stream), None if update is None else self._copy(update))

    def _copy(self, rows: torch.Tensor) -> torch.Tensor:
        copy: torch.Tensor = self._arena.take(rows.nbytes).view(rows.dtype).view(rows.shape)
        return copy.copy_(rows)


def _can_be_recorded(end: End, columns: RowColumns, num_rows: int) -> bool:
    """Returns whether the end itself may be a part of a pass: it calls kernels alone, and reads no columns. The logits
    of a pass that ends with tokens lie in memory that all passes share."""
    if isinstance(end, Logits):
        return num_rows <= MAX_LOGITS_ROWS
    return isinstance(end, Tokens) and columns is HOST_COLUMNS


def _places(inputs: StepInputs) -> Places:
    columns = {name: column.data_ptr() for name, column in inputs.columns.items() if name not in TABLES}
    return inputs.input_ids.data_ptr(), inputs.positions.data_ptr(), columns
