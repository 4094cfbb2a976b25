"""Where the ranks of engines of one host run: the GPU of each, its threads, and its share of the memory.

Settings that are given are kept. Defaults are divided among all ranks of all engines of the host, or of a GPU.
"""

from __future__ import annotations

import os
from dataclasses import replace

from ratoon.core.config import EngineConfig
from ratoon.core.errors import ConfigError
from ratoon.core.machine import usable_cores
from ratoon.core.ranks import ranks_of_node
from ratoon.execution.passes.cuda_driver import DEVICE_VARIABLE


def place_engine(config: EngineConfig, index: int, num_engines: int) -> EngineConfig:
    """The settings of engine `index`. If its worker is in its own process, they are those of the worker, too; if it has
    ranks, place_rank makes each one's."""
    if num_engines == 1:
        return config
    config = config.with_(index_on_host=index, num_on_host=num_engines)
    if config.data_parallel_lockstep:  # one pass of the model in a step, neither more nor less
        config = config.with_(scheduler=replace(config.scheduler, max_steps_in_flight=1))
    num_local_ranks = len(ranks_of_node(config, config.node_rank))
    if config.num_threads is None:
        config = config.with_(num_threads=max(1, usable_cores() // (num_engines * num_local_ranks)))
    return config if config.num_ranks > 1 else _place(config, 0, 1)


def place_rank(config: EngineConfig, number: int, count: int) -> EngineConfig:
    """The settings of rank `number` of `count` that the engine has on this host. ConfigError: there are fewer GPUs than
    ranks."""
    return config if config.num_ranks == 1 else _place(config, number, count)


def _place(config: EngineConfig, number: int, count: int) -> EngineConfig:
    num_workers = config.num_on_host * count
    own_number = config.index_on_host * count + number
    if config.num_threads is None:
        config = config.with_(num_threads=max(1, usable_cores() // num_workers))
    if config.device == "auto":
        config = config.with_(device=os.environ.get(DEVICE_VARIABLE) or "auto")
    device, num_devices = config.device, 1
    if device.startswith("cuda:") and count > 1:
        raise ConfigError("device", f"{device} is one GPU, and each of {count} ranks needs its own", "cuda or auto")
    if device in ("auto", "cuda"):
        import torch

        num_devices = torch.cuda.device_count()
        if not num_devices:
            return share_memory(config.with_(device="cpu") if device == "auto" else config, num_workers)
        if num_devices < count:
            setting = "tensor_parallel_size" if config.tensor_parallel_size > 1 else "pipeline_parallel_size"
            problem = f"{count} ranks of this host need a GPU each, and it has {num_devices}"
            raise ConfigError(setting, problem, f"at most {num_devices}, more hosts, or device cpu")
        config = config.with_(device=f"cuda:{own_number % num_devices}")
    return share_memory(config, len(range(own_number % num_devices, num_workers, num_devices)))


def share_memory(config: EngineConfig, num_workers: int) -> EngineConfig:
    """`num_workers` divide the free memory of a device, where no size was set."""
    return config.with_(cache=replace(config.cache, num_sharers=num_workers))
