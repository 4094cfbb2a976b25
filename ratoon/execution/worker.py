"""The worker: one device. Chooses device, dtype and kernels, loads the model, sizes the KV cache, owns the runner."""

from __future__ import annotations

import gc
import logging
import math
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ratoon.core.config import CacheConfig, EngineConfig, ModelConfig, resolve_max_model_len
from ratoon.core.errors import ConfigError, DeviceLostError, ModelError
from ratoon.core.kv import KVCacheConfig, bytes_per_block
from ratoon.core.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.execution.geometry import Geometry, geometry_of
from ratoon.execution.kv_tensors import dtype_name
from ratoon.execution.model_runner import ModelRunner
from ratoon.layers.native import kernel_set_name
from ratoon.layers.native_ops import NativeOps, native_ops_reasons, set_native_threads
from ratoon.layers.ops import Ops
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import TensorSource
from ratoon.models.build import build_model, declare_model
from ratoon.observe.startup import StartupTimer

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Defaults: a GPU is normally the engine's alone, host memory is shared with other processes.
KV_FRACTION = {"cuda": 0.85, "cpu": 0.4}
CPU_KV_LIMIT = 4 * 2**30
ALLOCATOR_PATIENCE = 0.3  # seconds
OLDEST_FOR_TRITON = (8, 0)  # compute capability
DEVICE_VARIABLE = "RATOON_DEVICE"  # overrides what the device "auto" means (CUDA if available)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What the worker resolved, for the scheduler and for startup logs."""

    kv_config: KVCacheConfig
    max_model_len: int
    device: str
    dtype: str
    ops: str
    attention: list[dict[str, Any]]  # for each KV group, and for an encoder: BackendChoice.facts
    num_threads: int
    weight_bytes: int
    kv_bytes: int


class Worker:
    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, tensors: TensorSource, timer: StartupTimer
    ) -> None:
        self._device = device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device, model_config)
        max_model_len = resolve_max_model_len(config.max_model_len, model_config)
        threads = config.num_threads or usable_cores()
        set_native_threads(threads)
        if config.num_threads is not None:  # otherwise torch's default stays: this process may use torch elsewhere
            torch.set_num_threads(threads)
        ops = choose_ops(device, dtype)
        # Before memory is allocated: check that there is a backend for every layer
        declared = declare_model(model_config, max_model_len)
        geometry = geometry_of(declared, config.attention_backend, config.cache.block_size, device, dtype)
        for choice in geometry.all_choices:
            is_slow = ops.name == "native" and config.attention_backend == "auto" and choice.backend.name != "cpu"
            logger.log(logging.WARNING if is_slow else logging.INFO, "attention of %s", choice)
        self._build_model = lambda: build_model(model_config, tensors, ops, device, dtype, max_model_len)
        with timer.phase("load weights"), torch.inference_mode(), refusing_what_does_not_fit(tensors.name):
            model = self._build_model()
        with timer.phase("allocate the KV cache"):
            kv_config = cut_kv_memory(config.cache, geometry, device)
            self.runner = ModelRunner(
                model,
                [choice.backend for choice in geometry.choices],
                kv_config,
                dtype=dtype,
                device=device,
                max_model_len=max_model_len,
                max_num_reqs=config.scheduler.max_num_seqs,
                max_num_tokens=max(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs),
                encoder_backend=None if geometry.encoder_choice is None else geometry.encoder_choice.backend,
            )
        num_weights = sum(math.prod(shape) for shape in tensors.shapes().values())
        self.facts = WorkerFacts(
            kv_config=kv_config,
            max_model_len=max_model_len,
            device=str(device),
            dtype=dtype_name(dtype),
            ops=f"native ({kernel_set_name()})" if ops.name == "native" else ops.name,
            attention=[choice.facts() for choice in geometry.all_choices],
            num_threads=threads,
            weight_bytes=num_weights * dtype.itemsize,
            kv_bytes=kv_config.num_blocks * kv_config.bytes_per_block,
        )

    def enter_thread(self) -> None:
        """Called once, on the thread that will execute all steps. On CUDA it gets a stream of its own: graphs can't be
        captured on the default one."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.synchronize()  # the weights were loaded on another stream
            torch.cuda.set_stream(torch.cuda.Stream())

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.runner.execute_model(plan)

    def sample_tokens(self) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        return self.runner.sample_tokens()

    def examine_failure(self, error: Exception) -> None:
        """After a step that raised: give back memory if there was too little. Raises DeviceLostError if the device
        does not work any more: a kernel's illegal access, for example, makes every later call fail."""
        if self._device.type != "cuda":
            return
        if not device_responds(self._device):
            raise DeviceLostError(f"{self._device} does not respond after an error: {error}") from error
        if isinstance(error, torch.OutOfMemoryError):
            traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
            torch.cuda.empty_cache()

    def sleep(self, level: int) -> None:
        """Level 1 frees the KV cache, level 2 the weights as well."""
        self.runner.kv.release()
        if self.runner.encoder is not None:
            self.runner.encoder.release()
        if level >= 2:
            del self.runner.model
        return_freed_memory()

    def wake_up(self) -> None:
        if not hasattr(self.runner, "model"):
            with torch.inference_mode():
                self.runner.model = self._build_model()
        self.runner.kv.allocate()


def choose_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """The fastest that serve this device and dtype."""
    if device.type != "cuda":
        return TorchOps() if native_ops_reasons(device, dtype) else NativeOps()
    try:
        from ratoon.layers.cuda_ops import CudaOps
        from ratoon.layers.product_choices import choices_file, read_choices
    except ImportError as error:
        logger.warning("operations on CUDA run in plain torch, which is slower: %s", error)
        return TorchOps()
    if torch.cuda.get_device_capability(device) < OLDEST_FOR_TRITON:
        logger.warning("operations on CUDA run in plain torch, which is slower: Triton kernels need a newer GPU")
        return TorchOps()
    choices = read_choices(choices_file(device))
    logger.info("operations on CUDA run by Triton kernels, products of %s", choices)
    return CudaOps(choices)


def device_responds(device: torch.device) -> bool:
    """Whether the device still executes work. The first call may report an error that is over by the second."""
    for _ in range(2):
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)
            return True
    return False


@contextmanager
def refusing_what_does_not_fit(source: str) -> Iterator[None]:
    """Raise ModelError if weights or tables do not fit in memory. torch has an exception class for this on GPUs
    only."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if type(error) is RuntimeError and "can't allocate memory" not in str(error):
            raise
        expected = "a smaller model, a smaller max_model_len, or more memory"
        raise ModelError(source, "does not fit into the memory that is free", expected) from error


def return_freed_memory() -> None:
    """Return freed memory to the system. Allocators keep it for a while for reuse."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    # torch's CPU allocator releases memory some time after it was freed, but only at the next allocation.
    time.sleep(ALLOCATOR_PATIENCE)
    torch.empty(2**26, dtype=torch.uint8)


def usable_cores() -> int:
    """Cores that this process may run on, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = os.environ.get(DEVICE_VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError("device", f"{name!r} is unknown", "auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"{name!r} is not supported", "auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device", f"{name!r} was asked for, but torch sees no CUDA device", "use cpu, or a CUDA build"
        )
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(
            "device", f"there is no {name!r}", f"this machine has {torch.cuda.device_count()} CUDA devices"
        )
    return device


def resolve_dtype(name: str, device: torch.device, model: ModelConfig) -> torch.dtype:
    """On a CPU float32 unless another is asked for: few CPUs multiply 16-bit numbers fast."""
    if name != "auto":
        return _DTYPES[name]
    return torch.float32 if device.type == "cpu" else _DTYPES.get(model.checkpoint_dtype, torch.bfloat16)


def cut_kv_memory(cache: CacheConfig, geometry: Geometry, device: torch.device) -> KVCacheConfig:
    """The number of blocks: as configured, or as many as the memory allows."""
    groups, cross = geometry.groups, geometry.cross
    price = bytes_per_block(groups if cross is None else (*groups, cross))
    num_blocks = cache.num_blocks
    if num_blocks is None:
        memory = cache.memory_bytes
        if memory is None and cache.gpu_memory_utilization is not None and device.type == "cuda":
            memory = share_of_gpu(device, cache.gpu_memory_utilization)
        elif memory is None:
            memory = int(free_memory(device) * (cache.memory_fraction or KV_FRACTION[device.type]))
            if device.type == "cpu" and cache.memory_fraction is None:
                memory = min(memory, CPU_KV_LIMIT)
        num_blocks = memory // price
        if num_blocks < 2:
            raise ConfigError(
                _memory_setting(cache),
                f"{memory:,} bytes for keys and values hold {num_blocks} blocks of {price:,} bytes",
                f"at least 2 blocks are needed: {2 * price:,} bytes",
            )
    return KVCacheConfig(num_blocks, cache.block_size, groups, cross, cache.swap_bytes // price)


def _memory_setting(cache: CacheConfig) -> str:
    """The setting that limits the memory."""
    if cache.memory_bytes is not None:
        return "kv_memory"
    return "kv_memory_fraction" if cache.gpu_memory_utilization is None else "gpu_memory_utilization"


def share_of_gpu(device: torch.device, utilization: float) -> int:
    """The memory that this fraction of a GPU leaves for blocks next to the loaded weights. As in vLLM, it is a limit
    for one engine, regardless of what else is on the device."""
    free, total = torch.cuda.mem_get_info(device)
    memory = int(total * utilization) - torch.cuda.memory_reserved(device)
    if memory > free:
        problem = f"{utilization} of {total:,} bytes leave {memory:,} for the KV cache, and {free:,} are free"
        raise ConfigError("gpu_memory_utilization", problem, "less of it, or end what else uses the GPU")
    return max(memory, 0)


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return 8 * 2**30  # the system does not report it
