"""Vectors in the front end: which states of a model are pooled, and the final form of the engine's result.

The states are pooled in the engine, not here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ratoon.core.config import ModelConfig
from ratoon.core.errors import RequestError
from ratoon.core.params import PoolingParams
from ratoon.core.wire import WireTensor


def own_pooling(model: ModelConfig, declared: str | None) -> str:
    """The default pooling of a model: as its files define it, else the last token for causal attention, and the mean
    otherwise."""
    return declared or ("last" if model.causal else "mean")


def with_pooling(params: PoolingParams, pooling: str) -> PoolingParams:
    """Returns params with this pooling, if they leave it open."""
    return params if params.pooling is not None else msgspec.structs.replace(params, pooling=pooling)


def verify_pooling(pooling: str, model: ModelConfig) -> None:
    if pooling == "first" and model.causal:
        raise RequestError("pooling", "the first token of this model sees no other", "last or mean")


def finish_vector(pooled: WireTensor, params: PoolingParams) -> Any:
    """A numpy array, float32: cut to `dimensions`, then brought to length 1 if asked. A vector of zeros stays one."""
    import numpy  # here, because most front ends never see a vector

    vector = numpy.array(pooled.view(), dtype=numpy.float32)[: params.dimensions]  # a copy: the frame is let go
    if not params.normalize:
        return vector
    length = numpy.linalg.norm(vector.astype(numpy.float64))  # squares of large values do not fit into float32
    return (vector / length).astype(numpy.float32) if length > 0 else vector
