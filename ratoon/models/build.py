"""Builds a model from a config and a source of tensors: once on the meta device to compare shapes, then with weights.

Reading files, and choosing device and dtype, are done elsewhere.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.layers.ops import ExpertGate, ExpertProducts, ExpertWeights, Ops, Product
from ratoon.layers.shard import WHOLE_MODEL, ModelPart, Shard
from ratoon.layers.stored import StoredTensor
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import TensorRequest, TensorSource, WeightNotes, Weights, read_tensor
from ratoon.models.base import LanguageModel
from ratoon.models.device_stream import open_destination
from ratoon.models.dummy_source import DummySource
from ratoon.models.registry import class_of
from ratoon.models.source import ModelSource

logger = logging.getLogger(__name__)

META = torch.device("meta")
TENSORS_AHEAD = 4  # for each thread: read but not yet taken, which bounds the memory
READERS_OF_DEVICE = 4  # threads; of a CPU's memory one, which is as fast as building the model


def build_model(
    config: ModelConfig,
    source: TensorSource,
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    max_position: int | None = None,
    part: ModelPart = WHOLE_MODEL,
    counts_experts: bool = False,
) -> LanguageModel:
    """The model with its weights, or a part of it, of which only the weights are read. A source that does not match the
    whole model raises ModelError before any tensor is read.

    `max_position` is the longest sequence that will be run, where it is less than the model's limit. `counts_experts`:
    routers count the rows of each expert.
    """
    length = config.max_position if max_position is None else max_position
    model_class = class_of(config)
    comparison = compare_with_source(config, source, length, dtype, part.shard)
    for name, (count, purpose) in comparison.left_out.items():
        logger.info("%s: the %d tensors of %s %s, and are left out", source.name, count, name, purpose)
    if part.stage.count > 1:
        comparison = Weights(source, TorchOps(), META, dtype, part.shard, stage=part.stage)
        model_class(config, comparison, length)
    with open_destination(device) as destination:
        notes = WeightNotes()
        read = partial(read_tensor, source, ops, destination=destination, notes=notes)
        with ReadAhead(read, comparison.requests, 1 if destination is None else READERS_OF_DEVICE) as ahead:
            weights = Weights(source, ops, device, dtype, part.shard, ahead, part.stage)
            weights.counts_experts = counts_experts
            model = model_class(config, weights, length)
    for line in notes.lines():
        logger.warning("%s: %s", source.name, line)
    return model


def compare_with_source(
    config: ModelConfig,
    source: TensorSource,
    max_position: int,
    dtype: torch.dtype = torch.float32,
    shard: Shard | None = None,
) -> Weights:
    """The weights on the meta device, which name the tensors to read. Raises ModelError if the source does not match
    the whole model."""
    comparison = Weights(source, TorchOps(), META, dtype, shard)
    class_of(config)(config, comparison, max_position)
    comparison.check_nothing_left()
    return comparison


def collect_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint for this config holds, in the order they are taken."""
    weights = _RecordingWeights()
    class_of(config)(config, weights, config.max_position)
    return weights.recorded


def open_tensors(config: EngineConfig, source: ModelSource) -> TensorSource:
    """The weights of a model. Random ones need no files: a config alone is enough to size an engine."""
    return DummySource(collect_shapes(source.config)) if config.load_format == "dummy" else source.tensors


def declare_model(config: ModelConfig, max_position: int, part: ModelPart = WHOLE_MODEL) -> LanguageModel:
    """The model, or a part of it, on the meta device, for any checkpoint: what its layers need, before memory is
    allocated."""
    return class_of(config)(config, _RecordingWeights(part=part), max_position)


def count_weights(config: ModelConfig, source: TensorSource, part: ModelPart) -> int:
    """The numbers in the tensors of a checkpoint, or in those that a part of the model takes of them."""
    shapes = source.shapes()
    if part.is_whole:
        return sum(math.prod(shape) for shape in shapes.values())
    weights = Weights(source, TorchOps(), META, torch.float32, part.shard, stage=part.stage)
    class_of(config)(config, weights, config.max_position)
    taken = (one.part.shape(shapes[one.name]) if one.part else shapes[one.name] for one in weights.requests)
    return sum(map(math.prod, taken))


def outline_model(
    config: ModelConfig,
    source: TensorSource,
    ops: Ops,
    dtype: torch.dtype,
    max_position: int,
    shard: Shard | None = None,
) -> LanguageModel:
    """The model that `build_model` would make for a rank, with its first layers alone and both ends, on the meta
    device: weights have shapes and no memory."""
    fewer = replace(config, num_layers=count_first_layers(config))
    return class_of(config)(fewer, Weights(source, ops, META, dtype, shard), max_position)


def shorten(model: LanguageModel) -> LanguageModel:
    """Returns the model with its first layers alone: a step of it needs as much memory beside weights and caches, since
    layers run one after the other."""
    short = copy(model)
    short.layers = model.layers[: count_first_layers(model.config)]
    short.layer_range = model.layer_range[: len(short.layers)]
    return short


def count_first_layers(config: ModelConfig) -> int:
    """Layers from the first on, so many that every kind is among them (they differ in their window, and in whether they
    have experts, or a state), and one that is not the last: that one skips rows."""
    kinds = [
        (
            config.window_of_layer(index),
            config.experts is not None and config.experts.is_in_layer(index),
            config.state_space is not None and config.state_space.is_in_layer(index),
        )
        for index in range(config.num_layers)
    ]
    return min(config.num_layers, max(2, 1 + max(map(kinds.index, kinds))))


class ReadAhead:
    """Reads tensors on other threads while the model is built from those before: reading waits for disks and
    dequantises, building copies and packs, and both leave the interpreter free.

    Called as `read` is. Expects requests in the given order; others are read on demand."""

    def __init__(
        self, read: Callable[[TensorRequest], StoredTensor], order: Iterable[TensorRequest], num_threads: int = 1
    ) -> None:
        self._read = read
        self._num_ahead = TENSORS_AHEAD * num_threads
        self._to_come = deque(order)
        self._reading: deque[tuple[TensorRequest, Future[StoredTensor]]] = deque()
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="ratoon-weights")

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *details: Any) -> None:
        self._executor.shutdown(cancel_futures=True)

    def __call__(self, request: TensorRequest) -> StoredTensor:
        while self._to_come and len(self._reading) <= self._num_ahead:
            upcoming = self._to_come.popleft()
            self._reading.append((upcoming, self._executor.submit(self._read, upcoming)))
        if self._reading and self._reading[0][0] == request:
            return self._reading.popleft()[1].result()
        return self._read(request)


def collect_products(config: ModelConfig) -> list[tuple[str, int, int]]:
    """Kind ("gated": with a gate's activation behind it), outputs and inputs of the products of a model, each once."""
    ops = _RecordingOps()
    class_of(config)(config, _RecordingWeights(ops), config.max_position)
    return list(dict.fromkeys(ops.recorded))


class _RecordingOps(TorchOps):
    """Records the shapes of products, in the order they are made."""

    def __init__(self) -> None:
        self.recorded: list[tuple[str, int, int]] = []
        self._shapes: dict[Product, tuple[int, int]] = {}

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        product = super().make_linear(weight, bias)
        self._shapes[product] = (weight.shape[0], weight.shape[1])
        self.recorded.append(("linear", *self._shapes[product]))
        return product

    def make_gated_mlp(self, gate_up: Product, down: Product) -> Product:
        self.recorded.append(("gated", *self._shapes[gate_up]))
        return super().make_gated_mlp(gate_up, down)

    def make_experts(self, experts: Iterable[ExpertWeights], own: range, gate: ExpertGate) -> ExpertProducts:
        """Experts are multiplied in groups, by kernels that need no choice of their own."""
        return TorchOps().make_experts(experts, own, gate)


class _RecordingWeights(Weights):
    """Provides every requested tensor in the requested shape, and records it."""

    def __init__(self, ops: Ops | None = None, part: ModelPart = WHOLE_MODEL) -> None:
        super().__init__(DummySource({}), ops or TorchOps(), META, torch.float32, part.shard, stage=part.stage)
        self.recorded: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        return True

    def _compare(self, name: str, shape: tuple[int, ...]) -> None:
        self.recorded[name] = shape
