"""Builds an engine core from settings and a model: the one place where executor, weights and scheduler meet."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from ratoon.attention.early_kernels import expected_launches
from ratoon.core.config import CacheConfig, EngineConfig, fit_to_device, fit_to_model, fit_to_stages
from ratoon.core.errors import ConfigError
from ratoon.engine.core import EngineCore
from ratoon.engine.processes.garbage import no_garbage_collection
from ratoon.engine.processes.socket_directory import SocketDirectory
from ratoon.engine.processes.torch_parts import without_unused_parts
from ratoon.execution.passes.cuda_driver import end_compiler, starting_driver
from ratoon.models.source import ModelSource
from ratoon.observe.logging import get_logger
from ratoon.observe.startup import StartupTimer

if TYPE_CHECKING:
    from ratoon.engine.kv_events import KVEventPublisher

logger = get_logger(__name__)


def build_core(config: EngineConfig, source: ModelSource, timer: StartupTimer, index: int | None = None) -> EngineCore:
    """`index`: of one of several engines of a service."""
    launches = expected_launches(config, source.config)
    with (
        timer.phase("import torch"),
        starting_driver(config.device, launches),
        no_garbage_collection(),
        without_unused_parts(config.device),
    ):
        from ratoon.distributed.executor import executor_class
        from ratoon.execution.devices import gpu_bytes
        from ratoon.models.build import open_tensors
    for package in ("ratoon", "torch"):
        note_missing_bytecode(sys.modules[package])
    tensors = open_tensors(config, source)
    config = fit_to_stages(fit_to_model(fit_to_device(config, gpu_bytes(config.device)), source.config))
    directory = None
    if config.cache.moves_blocks and (config.num_ranks > 1 or config.executor == "mp"):
        directory = SocketDirectory()  # in which ranks reach what moves their blocks
        config = config.with_(cache=replace(config.cache, rank_folder=str(directory.path)))
    try:
        with no_garbage_collection():
            executor = executor_class(config)(config, source.config, tensors, timer)
        core = EngineCore(config, executor)
    except BaseException:
        if directory is not None:
            directory.remove()
        raise
    finally:
        end_compiler()
    if directory is not None:
        core.when_closed = directory.remove
    if config.cache.kv_events is not None:
        core.publish_events(_open_publisher(config.cache, index))
    logger.info("%s is ready: %s", source.name, describe(core))
    return core


def _open_publisher(cache: CacheConfig, index: int | None) -> KVEventPublisher:
    try:
        from ratoon.engine.kv_events import KVEventPublisher, with_port_of
    except ImportError:
        raise ConfigError("kv_events", "pyzmq is not installed", "pip install 'ratoon[serve]'") from None
    assert cache.kv_events is not None
    replay = None if cache.kv_events_replay is None else with_port_of(cache.kv_events_replay, index or 0)
    return KVEventPublisher(with_port_of(cache.kv_events, index or 0), replay, cache.kv_events_topic, index)


def note_missing_bytecode(package: ModuleType) -> None:
    """Some installers leave it out, and Python may be told not to write it: then every start compiles the source."""
    spec = package.__spec__
    if spec is not None and spec.origin and spec.cached and not os.path.exists(spec.cached):
        folder = os.path.dirname(spec.origin)
        logger.info(
            "%s has no bytecode: its source is compiled at each start, which takes half a second or more. "
            "Once is enough: "
            "python -m compileall -q %s",
            spec.name,
            folder,
        )


def describe(core: EngineCore) -> dict[str, Any]:
    """Resolved settings and memory figures, for display."""
    facts = core.executor.facts
    kv = facts.kv_config
    graphs = core.executor.stats.graphs
    return {
        "device": facts.device,
        "dtype": facts.dtype,
        "kernels": facts.ops,
        "attention_backend": ", ".join(dict.fromkeys(choice["backend"] for choice in facts.attention)),
        "attention": facts.attention,  # for each KV group, and for an encoder: the backend and why not another
        "cuda_graphs": "off" if graphs is None else {"captured": graphs.num_graphs, "bytes": graphs.num_bytes},
        "num_threads": facts.num_threads,
        "max_model_len": facts.max_model_len,
        "max_num_batched_tokens": core.config.scheduler.token_budget,
        "weight_bytes": facts.weight_bytes,
        "weight_formats": facts.weight_formats,
        "kernel_choices": facts.kernel_choices,
        "kv_bytes": facts.kv_bytes,
        "step_bytes": facts.step_bytes,
        "swap_bytes": kv.num_host_blocks * kv.bytes_per_block,
        "swap_costs": None if facts.swap_costs is None else msgspec.to_builtins(facts.swap_costs),
        "kv_bytes_per_token": kv.bytes_per_token,
        "num_blocks": kv.num_blocks,
        "block_size": kv.block_size,
        "kv_groups": len(kv.groups),
        "has_encoder": kv.cross is not None,  # beside the decoder
        "kv_capacity_tokens": kv.capacity,  # of a sequence
    }


def calm_thread_pools() -> None:
    """Spinning torch threads would take cores from the kernels' threads. Must be set before torch is loaded."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
