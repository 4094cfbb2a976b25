"""Small steps on a CPU as recorded passes: their layers run by one native call, without Python between the kernels.

A pass is recorded the second time that a step of its shape comes, and replayed from then on; the results are the same
to the bit. Embeddings and logits are computed outside. A model whose layers use anything but kernels is not recorded.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from ratoon.execution.kv_tensors import KVTensors
from ratoon.execution.step_context import PagedStep
from ratoon.execution.step_inputs import StepInputs
from ratoon.layers.native.recording import Arena, Program, Recording
from ratoon.models.base import FinalStates, LanguageModel

logger = logging.getLogger(__name__)

MAX_TOKENS = 64  # of a step: with more, the kernels take so long that what lies between them does not matter
MAX_PASSES = 256


class PassShape(NamedTuple):
    """What the arguments of kernels depend on, besides places in memory."""

    num_tokens: int
    num_reqs: int


class RecordedPass(NamedTuple):
    program: Program
    stream: torch.Tensor  # [T, H]: the embeddings are brought here
    positions: int  # where they were
    states: FinalStates
    metadata: list[Any]  # of each KV group
    cross: Any


class RecordedPasses:
    def __init__(self, kv: KVTensors) -> None:
        self._kv = kv
        self._arena = Arena()
        self._passes: dict[PassShape, RecordedPass] = {}  # in the order of their last use
        self._seen: set[PassShape] = set()
        self._is_possible = True

    @staticmethod
    def can_serve(kv: KVTensors) -> bool:
        return all(backend.supports_recording for backend in kv.backends)

    @property
    def num_bytes(self) -> int:
        """Of memory that passes keep."""
        return self._arena.num_bytes

    def __len__(self) -> int:
        return len(self._passes)

    def run(self, model: LanguageModel, inputs: StepInputs) -> FinalStates | None:
        """The final states of all rows; they are valid until the next pass. None: the step has to run call by call."""
        shape = PassShape(len(inputs.input_ids), len(inputs.cu_num_tokens))
        if not self._is_possible or shape.num_tokens > MAX_TOKENS:
            return None
        recorded = self._passes.pop(shape, None)
        if recorded is not None:
            states = self._replay(recorded, model, inputs)
            if states is not None:
                self._passes[shape] = recorded
            return states
        if shape not in self._seen:
            self._seen.add(shape)
            return None
        return self._record(shape, model, inputs)

    def clear(self) -> None:
        """Drop all: memory that they use is about to be freed."""
        self._passes.clear()
        self._seen.clear()
        self._arena = Arena()

    def _replay(self, recorded: RecordedPass, model: LanguageModel, inputs: StepInputs) -> FinalStates | None:
        kv = self._kv
        in_place = inputs.positions.data_ptr() == recorded.positions
        for backend, metadata, group in zip(kv.backends, recorded.metadata, inputs.groups):
            in_place &= backend.update_metadata(metadata, group)
        if inputs.cross is not None:
            in_place &= kv.cross_backend.update_metadata(recorded.cross, inputs.cross)
        if not in_place:
            return None
        recorded.stream.copy_(model.embed_tokens(inputs.input_ids, inputs.positions))
        recorded.program.run()
        return recorded.states

    def _record(self, shape: PassShape, model: LanguageModel, inputs: StepInputs) -> FinalStates:
        kv = self._kv
        metadata = [backend.build_metadata(group) for backend, group in zip(kv.backends, inputs.groups)]
        cross = None if inputs.cross is None else kv.cross_backend.build_metadata(inputs.cross)
        embeddings = model.embed_tokens(inputs.input_ids, inputs.positions)
        stream = self._arena.take(embeddings.nbytes).view(embeddings.dtype).view(embeddings.shape)
        stream.copy_(embeddings)
        with Recording(self._arena) as recording:
            states = model.forward_stream(stream, inputs.positions, PagedStep(kv, metadata, cross))
        program = recording.program()
        if program is None:
            self._is_possible = False
            logger.info("steps run call by call: %s can't be recorded", ", ".join(sorted(set(recording.obstacles))))
            return states
        if len(self._passes) >= MAX_PASSES:
            self._passes.pop(next(iter(self._passes)))
        self._passes[shape] = RecordedPass(program, stream, inputs.positions.data_ptr(), states, metadata, cross)
        return states
