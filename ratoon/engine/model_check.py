"""What a model is and how it would run, from its config alone: nothing is downloaded but config.json, and no weight is
read. Where weights are on this machine, their names and shapes are compared by their headers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratoon.core.config import EngineConfig, ModelConfig, fit_to_model, resolve_max_model_len
from ratoon.core.errors import ModelError
from ratoon.core.kv import KVCacheConfig
from ratoon.models.embedded import EMBEDDED_MODELS
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.hub import HUB_ID, fetch_config
from ratoon.models.source import ModelSource, resolve_model, what_would_be_right, with_overrides
from ratoon.models.speeds import speeds_of
from ratoon.models.tokenizer import read_json

NOT_COMPARED = "not here: the sizes are those that the config asks for"


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The answer of `ratoon models --check`. Sizes are bytes."""

    model: str
    architecture: str
    backend: str  # native or transformers
    device: str
    dtype: str
    products: str  # the kernels of its products
    attention: Mapping[str, str]  # the backend of each group of layers
    num_layers: int
    num_weights: int
    weight_bytes: int  # in dtype
    kv_bytes_per_token: int
    max_model_len: int
    weights: str  # what was compared
    speeds: tuple[str, ...]  # as measured with models of this architecture


def check_model(config: EngineConfig) -> ModelCheck:
    """Raises ModelError or ConfigError, with the reason, for a model that this engine can't run."""
    from ratoon.execution.choices import choose_geometry, choose_kv_dtype, choose_ops
    from ratoon.execution.device_kinds import open_device
    from ratoon.execution.devices import resolve_dtype
    from ratoon.execution.kv.kv_tensors import dtype_name
    from ratoon.layers.native import kernel_set_name
    from ratoon.models.build import collect_shapes, compare_with_source, declare_model
    from ratoon.models.dummy_source import DummySource

    found, source = _read_config(config)  # behind the imports: torch is there then, and no child is asked
    fit_to_model(config, found)
    kind, device = open_device(config.device)
    dtype = resolve_dtype(config.dtype, device, found)
    ops = choose_ops(device, dtype, config.batch_invariant, config.quantization, kind=kind)
    length = resolve_max_model_len(config.max_model_len, found)
    declaration, shapes = declare_model(found, length), collect_shapes(found)
    kv_dtype = choose_kv_dtype(config, ops, DummySource(shapes) if source is None else source.tensors)
    geometry = choose_geometry(config, declaration, declaration, device, dtype, kv_dtype)
    block_size = config.cache.block_size
    pool = KVCacheConfig(2, block_size, geometry.groups, cross=geometry.cross)
    compared = NOT_COMPARED
    if source is not None:
        compare_with_source(found, source.tensors, length)
        compared = f"{len(source.tensors.shapes())} tensors have the names and shapes of the config"
    num_weights = sum(map(math.prod, shapes.values()))
    return ModelCheck(
        model=config.model,
        architecture=found.architecture,
        backend="native" if found.library is None else "transformers",
        device=str(device),
        dtype=dtype_name(dtype),
        products=f"native ({kernel_set_name()})" if ops.name == "native" else ops.name,
        attention={choice["layers"]: choice["backend"] for choice in (one.facts() for one in geometry.all_choices)},
        num_layers=found.num_layers,
        num_weights=num_weights,
        weight_bytes=num_weights * dtype.itemsize,
        kv_bytes_per_token=pool.bytes_per_block // block_size,
        max_model_len=length,
        weights=compared,
        speeds=() if found.library is not None else tuple(one.text() for one in speeds_of(found.architecture)),
    )


def _read_config(config: EngineConfig) -> tuple[ModelConfig, ModelSource | None]:
    """The config of a model, and the model where its files are on this machine."""
    name, path = config.model, Path(config.model).expanduser()
    is_local = name in EMBEDDED_MODELS or path.is_file() or (bool(name) and path.is_dir())
    if path.name == "config.json" and path.is_file():
        return _parse(read_json(path), str(path), config), None
    if path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        return _parse(read_json(path / "config.json"), str(path), config), None
    if is_local:
        source = resolve_model(name, config.hf_overrides, config.model_backend)
        return source.config, source
    if HUB_ID.fullmatch(name) and not name.startswith("."):
        return _parse(read_json(fetch_config(name, what_would_be_right())), name, config), None
    raise ModelError(name[:300], "is no file, folder or known model", what_would_be_right())


def _parse(raw: Mapping[str, Any], source: str, config: EngineConfig) -> ModelConfig:
    return parse_hf_config(with_overrides(raw, config.hf_overrides), source, config.model_backend)
