"""Several engines on one machine: which device and which share of the cores and the memory each of them gets."""

from __future__ import annotations

from dataclasses import replace

from ratoon.core.config import EngineConfig
from ratoon.core.machine import usable_cores


def place_engine(config: EngineConfig, index: int, num_engines: int) -> EngineConfig:
    """The settings of engine `index`. Given values are kept; only defaults are divided among engines."""
    if num_engines == 1:
        return config
    import torch

    from ratoon.execution.kv.kv_memory import KV_FRACTION

    if config.num_threads is None:
        config = config.with_(num_threads=max(1, usable_cores() // num_engines))
    num_devices = torch.cuda.device_count() if config.device in ("auto", "cuda") else 0
    if not num_devices:
        return config
    config = config.with_(device=f"cuda:{index % num_devices}")
    cache = config.cache
    if cache.num_blocks is None and cache.memory_bytes is None and cache.memory_fraction is None:
        sharers = len(range(index % num_devices, num_engines, num_devices))  # engines on the same device
        config = config.with_(cache=replace(cache, memory_fraction=KV_FRACTION["cuda"] / sharers))
    return config
