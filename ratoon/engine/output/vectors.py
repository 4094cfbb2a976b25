"""Vectors in the front end: which states of a model are pooled, and the final form of the engine's result.

The states are pooled in the engine, not here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ratoon.core.config import ClassifierConfig, ModelConfig
from ratoon.core.errors import RequestError
from ratoon.core.params import PoolingParams
from ratoon.core.wire import WireTensor


def own_pooling(model: ModelConfig, declared: str | None) -> str:
    """The default pooling of a model: as its files define it, else the last token for causal attention, and the mean
    otherwise."""
    return declared or ("last" if model.causal else "mean")


def with_pooling(params: PoolingParams, pooling: str, model: ModelConfig) -> PoolingParams:
    """Returns params with this pooling, if they leave it open; those for the model's head with what belongs to that."""
    if not params.classify:
        return params if params.pooling is not None else msgspec.structs.replace(params, pooling=pooling)
    head = verify_classifier(model)
    return msgspec.structs.replace(params, pooling=head.pooling, activation=params.activation or head.activation)


def verify_pooling(params: PoolingParams, pooling: str, model: ModelConfig) -> None:
    if params.classify:
        verify_classifier(model)
    elif (params.pooling or pooling) == "first" and model.causal:
        raise RequestError("pooling", "the first token of this model sees no other", "last or mean")


def verify_classifier(model: ModelConfig) -> ClassifierConfig:
    """The head that classifies. RequestError: the model has none."""
    if model.classifier is None:
        what = "generates text and gives vectors" if model.generates else "gives vectors"
        raise RequestError("model", f"has no head that classifies: it {what}", "a model with such a head")
    return model.classifier


def verify_dimensions(dimensions: int | None, model: ModelConfig) -> None:
    """RequestError: the model does not say that its vectors may be cut to so many numbers."""
    if dimensions is None:
        return
    if model.matryoshka is None:
        problem = "the model does not say that its vectors can be cut (is_matryoshka or matryoshka_dimensions)"
        raise RequestError("dimensions", problem, "leave it out")
    if model.matryoshka and dimensions not in model.matryoshka:
        known = ", ".join(map(str, model.matryoshka))
        raise RequestError("dimensions", f"{dimensions} is none that the model was trained for", f"one of {known}")


def cut_to(dimensions: int, params: Any) -> PoolingParams:
    """Params with these dimensions."""
    if params is not None and not isinstance(params, PoolingParams):
        raise RequestError("dimensions", "is one for all prompts, and params are one for each", "those of the params")
    if params is not None and params.dimensions not in (None, dimensions):
        raise RequestError("dimensions", f"{dimensions} contradicts the params' {params.dimensions}", "one of the two")
    return msgspec.structs.replace(PoolingParams() if params is None else params, dimensions=dimensions)


def finish_vector(pooled: WireTensor, params: PoolingParams) -> Any:
    """A numpy array, float32: cut to `dimensions`, then brought to length 1 if asked. A vector of zeros stays one."""
    import numpy  # here, because most front ends never see a vector

    if params.classify:
        return finish_logits(numpy.array(pooled.view(), dtype=numpy.float32), params.activation)
    vector = numpy.array(pooled.view(), dtype=numpy.float32)[: params.dimensions]  # a copy: the frame is let go
    if not params.normalize:
        return vector
    length = numpy.linalg.norm(vector.astype(numpy.float64))  # squares of large values do not fit into float32
    return (vector / length).astype(numpy.float32) if length > 0 else vector


def finish_logits(logits: Any, activation: str | None) -> Any:
    """Numbers of labels [labels], float32: the logits, or what the activation makes of them."""
    import numpy

    wide = logits.astype(numpy.float64)
    if activation == "softmax":
        powers = numpy.exp(wide - wide.max())
        return (powers / powers.sum()).astype(numpy.float32)
    if activation == "sigmoid":
        small = numpy.exp(-numpy.abs(wide))  # of large numbers, the power would overflow
        return numpy.where(wide >= 0, 1 / (1 + small), small / (1 + small)).astype(numpy.float32)
    return logits
