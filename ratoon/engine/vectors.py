"""A pooled hidden state, as the engine sends it, to the vector that a caller asked for."""

from __future__ import annotations

from typing import Any

from ratoon.core.params import PoolingParams
from ratoon.core.wire import WireTensor


def finish_vector(pooled: WireTensor, params: PoolingParams) -> Any:
    """A numpy array, float32: cut to `dimensions`, then brought to length 1 if asked. A vector of zeros stays one."""
    import numpy  # here, because most front ends never see a vector

    vector = numpy.array(pooled.view(), dtype=numpy.float32)[: params.dimensions]  # a copy: the frame is let go
    if not params.normalize:
        return vector
    length = numpy.linalg.norm(vector.astype(numpy.float64))  # squares of large values do not fit into float32
    return (vector / length).astype(numpy.float32) if length > 0 else vector
