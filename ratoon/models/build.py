"""Making a model from a config and a source of tensors: once on the meta device to compare, then for real.

Reading files is not done here, and neither is choosing a device or a dtype.
"""

from __future__ import annotations

import torch

from ratoon.core.config import ModelConfig
from ratoon.layers.ops import Ops
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import TensorSource, Weights
from ratoon.models.base import LanguageModel
from ratoon.models.read_ahead import ReadAhead
from ratoon.models.registry import find_model_class

META = torch.device("meta")


def build_model(
    config: ModelConfig,
    source: TensorSource,
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    max_position: int | None = None,
) -> LanguageModel:
    """The model with its weights. A source that does not fit is a ModelError before any tensor of it is read.

    `max_position` is the longest sequence that will be run, where it is less than what the model could do.
    """
    length = config.max_position if max_position is None else max_position
    model_class = find_model_class(config.architecture)
    comparison = Weights(source, TorchOps(), META, dtype)
    model_class(config, comparison, length)
    comparison.check_nothing_left()
    with ReadAhead(source, comparison.taken_in_order()) as ahead:
        return model_class(config, Weights(ahead, ops, device, dtype), length)


def collect_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint for this config holds, in the order they are taken."""
    shapes: dict[str, tuple[int, ...]] = {}
    find_model_class(config.architecture)(config, _RecordingWeights(shapes), config.max_position)
    return shapes


class _NothingStored:
    """The source behind a recording: it is only ever asked for its name."""

    name = "no file"

    def __init__(self, found: dict[str, tuple[int, ...]]) -> None:
        self.found = found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.found

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError("a recording pass reads nothing")


class _RecordingWeights(Weights):
    """Has every tensor that it is asked for, in the shape that is asked for, and notes it down."""

    def __init__(self, recorded: dict[str, tuple[int, ...]], prefix: str = "") -> None:
        super().__init__(_NothingStored(recorded), TorchOps(), META, torch.float32, prefix)
        self.recorded = recorded

    def __truediv__(self, name: object) -> Weights:
        return _RecordingWeights(self.recorded, f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.recorded[self.prefix + name] = shape
        return super().take(name, *shape, dtype=dtype)
