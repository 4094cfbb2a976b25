"""A step on one stage of a pipeline: what comes before its layers, and where the rows go behind them.

The residual stream travels between stages as one tensor, with the rows behind it that ends of the program read at
layers of earlier stages. Both sides know its size from the step, so nothing but numbers travels. A worker that has the
whole model is the first stage and the last.
"""

from __future__ import annotations

import torch

from ratoon.execution.inputs.step_inputs import StepInputs
from ratoon.execution.passes.ends import LayerRows
from ratoon.layers.attention import StepContext
from ratoon.models.base import FinalStates, LanguageModel, StreamStates

Tensor = torch.Tensor


def run_stage(
    model: LanguageModel,
    inputs: StepInputs,
    step: StepContext,
    rows: Tensor | None,
    observer: LayerRows | None,
    num_layers: int | None,
) -> FinalStates | None:
    """The final states of these rows, as LanguageModel.forward returns them. None: this is not the last stage, and the
    next one has the rows."""
    stage = model.stage
    observers = [] if observer is None else [observer]
    if stage.is_first and stage.is_last:
        return model.forward(
            inputs.input_ids, inputs.positions, step, rows, observers, num_layers, inputs.rope_positions,
            inputs.embeddings,
        )  # fmt: skip
    stream = begin_stage(model, inputs, observer)
    if stage.is_last:
        return model.forward_stream(stream, inputs.rope_positions, step, rows, observers, num_layers)
    states = model.forward_stage(StreamStates(stream), inputs.rope_positions, step, observers, num_layers)
    hand_on(model, states, observer)
    return None


def begin_stage(model: LanguageModel, inputs: StepInputs, observer: LayerRows | None = None) -> Tensor:
    """The stream [T, H] before the layers of this stage: the embeddings, or what the stage before has sent."""
    if model.stage.is_first:
        return model.embed_tokens(inputs.input_ids, inputs.positions, inputs.embeddings, inputs.adapters)
    return _receive(model, len(inputs.input_ids), observer)


def hand_on(model: LanguageModel, states: StreamStates, observer: LayerRows | None = None) -> None:
    """Sends the stream to the next stage. Its memory is read until the next call, and changed here: the update is added
    first, which the next norm would do, so that half as many bytes travel."""
    stream = states.stream if states.update is None else states.stream.add_(states.update)
    seen = [] if observer is None else observer.seen_before(model.layer_range.stop)
    model.send_rows(torch.cat([stream, *(found[layer] for found, layer, _ in seen)]) if seen else stream)


def _receive(model: LanguageModel, num_tokens: int, observer: LayerRows | None) -> Tensor:
    """The stream [T, H]. The observer gets what earlier stages have seen for it."""
    seen = [] if observer is None else observer.seen_before(model.layer_range.start)
    sizes = [num_tokens, *(count for _, _, count in seen)]
    stream, *others = model.receive_rows(sum(sizes)).split(sizes)
    for (found, layer, _), states in zip(seen, others, strict=True):
        found[layer] = states
    return stream
