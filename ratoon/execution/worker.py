"""The worker: one device. Chooses device, dtype and kernels, loads the model, sizes the KV cache, owns the runner."""

from __future__ import annotations

import gc
import logging
import math
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ratoon.core.config import EngineConfig, ModelConfig, resolve_max_model_len
from ratoon.core.errors import ConfigError, DeviceLostError, ModelError
from ratoon.core.kv import KVCacheConfig, SwapCosts
from ratoon.core.machine import usable_cores
from ratoon.core.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.execution.devices import gpu_name, has_modes_of_its_own, resolve_device, resolve_dtype, use_device
from ratoon.execution.geometry import Geometry, geometry_of
from ratoon.execution.kv_memory import (
    cut_kv_memory,
    free_memory,
    gib,
    largest_step,
    measure_prefill,
    measure_step,
    num_blocks_of,
    one_prompt,
    sizes_by_memory,
    verify_longest_sequence,
)
from ratoon.execution.kv_tensors import dtype_name
from ratoon.execution.model_runner import ModelRunner
from ratoon.layers.native import has_quantised_kernels, kernel_set_name
from ratoon.layers.native_ops import NativeOps, native_ops_reasons, set_native_threads
from ratoon.layers.ops import Ops
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import TensorSource
from ratoon.models.base import LanguageModel
from ratoon.models.build import META, build_model, declare_model, outline_model, shorten
from ratoon.observe.startup import StartupTimer

if TYPE_CHECKING:
    from ratoon.execution.compile_ahead import CompileAhead
    from ratoon.execution.graphs import Capture

logger = logging.getLogger(__name__)

# Compute capabilities
BITS_OF_FLOATS = {"int8": 8, "int4": 4}  # by the setting `quantization`
OLDEST_FOR_DEPENDENT_LAUNCH = (9, 0)
OLDEST_WITH_FP8 = (8, 9)
# None: the dtype of the model
KV_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}

# Bytes. Smaller ones are loaded before the kernels are compiled; both need the interpreter, so they come second.
SMALL_WEIGHTS = 4 * 2**30

ALLOCATOR_PATIENCE = 0.3  # seconds


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
    # What the weights are in memory: format, num_weights, num_bytes, product
    weight_formats: list[dict[str, Any]] = field(default_factory=list)
    step_bytes: int = 0  # what the largest step needs beside both; measured on a GPU, unless the pool's size is set
    swap_costs: SwapCosts | None = None  # measured on a GPU, where preempted sequences may be swapped out


class Worker:
    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, tensors: TensorSource, timer: StartupTimer
    ) -> None:
        self._device = device = resolve_device(config.device)
        self._stream: torch.cuda.Stream | None = None  # of all steps
        self._kernels: CompileAhead | None = None
        use_device(device)
        dtype = resolve_dtype(config.dtype, device, model_config)
        max_model_len = resolve_max_model_len(config.max_model_len, model_config)
        threads = config.num_threads or usable_cores()
        set_native_threads(threads)
        if config.num_threads is not None:  # otherwise torch's default stays: this process may use torch elsewhere
            torch.set_num_threads(threads)
        ops = choose_ops(device, dtype, config.batch_invariant, config.quantization)
        # Before memory is allocated: check that there is a backend for every layer
        declared = declare_model(model_config, max_model_len)
        kv_dtype = KV_DTYPES[config.cache.kv_cache_dtype]
        choose_geometry = partial(
            geometry_of,
            declared,
            config.attention_backend,
            config.cache.block_size,
            device,
            dtype,
            kv_dtype,
            config.batch_invariant,
        )
        geometry = choose_geometry()
        for choice in geometry.all_choices:
            is_slow = ops.name == "native" and config.attention_backend == "auto" and choice.backend.name != "cpu"
            logger.log(logging.WARNING if is_slow else logging.INFO, "attention of %s", choice)
        self._build_model = lambda: build_model(model_config, tensors, ops, device, dtype, max_model_len)

        def make_runner(
            model: LanguageModel, geometry: Geometry, kv_config: KVCacheConfig, device: torch.device, capture: Any
        ) -> ModelRunner:
            return ModelRunner(
                model,
                [choice.backend for choice in geometry.choices],
                kv_config,
                dtype=dtype,
                device=device,
                max_model_len=max_model_len,
                max_num_reqs=config.scheduler.max_num_seqs,
                max_num_tokens=max(config.scheduler.token_budget, config.scheduler.max_num_seqs),
                encoder_backend=None if geometry.encoder_choice is None else geometry.encoder_choice.backend,
                inputs_on_device=device.type != "cpu",
                capture=capture,
                record=ops.name == "native",
            )

        def probe_for(plan: SchedulerOutput) -> KVCacheConfig:
            return KVCacheConfig(num_blocks_of(plan), config.cache.block_size, geometry.groups)

        can_probe = device.type == "cuda" and model_config.causal and not model_config.encoder
        if can_probe:
            from ratoon.execution.compile_ahead import CompileAhead, capture_nothing
            from ratoon.execution.cuda_driver import take_compiler

            largest = largest_step(config.scheduler, config.cache.block_size, len(geometry.groups), max_model_len)
            probe = probe_for(largest)
            without_memory = choose_geometry()  # backends of its own: they keep memory between steps

            def make_outline() -> ModelRunner:
                outline = outline_model(model_config, tensors, ops, dtype, max_model_len)
                return make_runner(outline, without_memory, probe, META, capture_nothing)

            self._kernels = kernels = CompileAhead(make_outline, largest, device, threads, take_compiler())
        num_weights = sum(math.prod(shape) for shape in tensors.shapes().values())
        if can_probe and num_weights * dtype.itemsize < SMALL_WEIGHTS:
            with timer.phase("find kernels"):
                kernels.wait_until_recorded()
        fitting = refusing_what_does_not_fit(tensors.name, num_weights, device, dtype)
        with timer.phase("load weights"), torch.inference_mode(), fitting:
            model = self._build_model()
        capture = choose_capture(config, device, geometry)
        step_bytes, token_seconds = 0, None
        if can_probe:
            with timer.phase("compile kernels"):
                kernels.wait()
        if can_probe and sizes_by_memory(config.cache):
            with timer.phase("measure the largest step"):
                kv_bytes = probe.num_blocks * probe.bytes_per_block
                make = partial(make_runner, shorten(model), geometry, probe, device, capture)
                step_bytes = measure_step(largest, kv_bytes, make, device)
        if can_probe and config.cache.swap_bytes and config.cache.preemption_mode == "auto":
            with timer.phase("measure a prompt"):
                plan = one_prompt(config.scheduler, config.cache.block_size, len(geometry.groups), max_model_len)
                make = partial(make_runner, model, geometry, probe_for(plan), device, capture)
                token_seconds = measure_prefill(plan, make, device)
        with timer.phase("allocate the KV cache"):
            kv_config = cut_kv_memory(config.cache, geometry, device, step_bytes)
            if device.type == "cuda":
                verify_longest_sequence(kv_config, config.cache, max_model_len)
            self.runner = make_runner(model, geometry, kv_config, device, capture)
        swap_costs = None
        block_seconds = None if token_seconds is None else self.runner.kv.measure_swaps()
        if token_seconds is not None and block_seconds is not None:
            swap_costs = SwapCosts(block_seconds, token_seconds)
            speed = kv_config.bytes_per_block / block_seconds / 1e9
            logger.info(
                "blocks are fetched from the host at %.1f GB/s, prompts are computed at %.0f tokens/s",
                speed,
                1 / token_seconds,
            )
        weight_formats = describe_weights(ops, num_weights, dtype)
        self.facts = WorkerFacts(
            kv_config=kv_config,
            max_model_len=max_model_len,
            device=str(device),
            dtype=dtype_name(dtype),
            ops=f"native ({kernel_set_name()})" if ops.name == "native" else ops.name,
            attention=[choice.facts() for choice in geometry.all_choices],
            num_threads=threads,
            weight_bytes=sum(one["num_bytes"] for one in weight_formats),
            weight_formats=weight_formats,
            kv_bytes=kv_config.num_blocks * kv_config.bytes_per_block,
            step_bytes=step_bytes,
            swap_costs=swap_costs,
        )

    def enter_thread(self) -> None:
        """Called once, on the thread that will execute all steps. On CUDA it gets a stream of its own: graphs can't be
        captured on the default one."""
        if self._device.type == "cuda":
            use_device(self._device)
            torch.cuda.synchronize()  # the weights were loaded on another stream
            self._stream = torch.cuda.Stream()
            torch.cuda.set_stream(self._stream)

    def on_lent_thread(self) -> AbstractContextManager[object] | None:
        """Around a step on another thread: the same stream. None for a thread with modes that would change the step,
        and on a CPU, where a step is the work itself and not its launch, and its threads are set up for one caller."""
        if self._stream is None or has_modes_of_its_own():
            return None
        return torch.cuda.stream(self._stream)

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.runner.execute_model(plan)

    def sample_tokens(self) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        return self.runner.sample_tokens()

    @property
    def has_idle_work(self) -> bool:
        graphs = self.runner.graphs
        return graphs is not None and (graphs.can_capture_next or (graphs.can_run_ahead and self._has_kernels))

    @property
    def _has_kernels(self) -> bool:
        """Whether a step can run in advance without compiling, for which a request that comes meanwhile would wait."""
        return self._kernels is not None and self._kernels.has_ended

    @property
    def has_work_of_steps(self) -> bool:
        return self.runner.graphs is not None and self.runner.graphs.can_capture_next

    @property
    def is_busy(self) -> bool:
        """Whether the device has not executed all steps that were launched."""
        return self._stream is not None and not self._stream.query()

    def work_when_idle(self) -> bool:
        """Do a piece of work that later steps profit from, and wait until the device has done it. False: there is none
        now."""
        graphs = self.runner.graphs
        if graphs is None or not self.has_idle_work or self.is_busy:
            return False
        with torch.inference_mode():
            is_done = graphs.capture_next() if graphs.can_capture_next else graphs.run_ahead()
        if self._stream is not None:
            self._stream.synchronize()  # otherwise the device would not be idle for the next piece
        return is_done

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
        if self.runner.graphs is not None:
            self.runner.graphs.clear()
        if self.runner.recorded is not None:
            self.runner.recorded.clear()
        if level >= 2:
            del self.runner.model
        return_freed_memory()

    def wake_up(self) -> None:
        if not hasattr(self.runner, "model"):
            with torch.inference_mode():
                self.runner.model = self._build_model()
        self.runner.kv.allocate()


def choose_ops(
    device: torch.device, dtype: torch.dtype, batch_invariant: bool = False, quantization: str = "auto"
) -> Ops:
    """The fastest that serve this device and dtype. Raises ConfigError if they can't do what is asked for."""
    if batch_invariant and quantization == "fp8":
        raise ConfigError("batch_invariant", "sums depend on the batch with quantization fp8", "one of the two")
    ops = _choose_ops(device, dtype, batch_invariant, quantization)
    if batch_invariant and ops.name == "torch":
        problem = f"sums depend on the batch with the kernels 'torch', which are those for {dtype} on {device}"
        raise ConfigError("batch_invariant", problem, "float32 on a CPU, or a GPU")
    if quantization in BITS_OF_FLOATS and ops.name != "native":
        problem = f"{quantization} is not there with the kernels {ops.name!r}, which are those for {dtype} on {device}"
        raise ConfigError("quantization", problem, "float32 on a CPU")
    if quantization == "fp8":
        expected = "leave it out, or a GPU of compute capability 8.9 or higher and bfloat16"
        if ops.name != "cuda":
            raise ConfigError("quantization", f"fp8 is not there with the kernels {ops.name!r} on {device}", expected)
        if dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) < OLDEST_WITH_FP8:
            raise ConfigError("quantization", f"fp8 is not there for {dtype} on {gpu_name(device)}", expected)
    return ops


def _choose_ops(device: torch.device, dtype: torch.dtype, batch_invariant: bool, quantization: str) -> Ops:
    if device.type != "cuda":
        if native_ops_reasons(device, dtype):
            return TorchOps()
        bits = BITS_OF_FLOATS.get(quantization)
        keep = quantization == "gguf" or bits is not None
        if keep and not has_quantised_kernels():
            logger.warning("weights are multiplied in float32: the kernels here can't multiply by quantised ones")
        return NativeOps(keep, bits)
    from ratoon.layers.cuda_ops import CudaOps  # imports triton
    from ratoon.layers.gpu import has_wgmma
    from ratoon.layers.product_choices import choices_file, read_choices

    choices = read_choices(choices_file(device))
    choices.has_wgmma = has_wgmma()
    logger.info("operations on CUDA run by Triton kernels, products of %s", choices)
    early = torch.cuda.get_device_capability(device) >= OLDEST_FOR_DEPENDENT_LAUNCH
    kept = quantization if quantization == "fp8" else None
    return CudaOps(choices, dependent_launch=early, batch_invariant=batch_invariant, quantization=kept)


def describe_weights(ops: Ops, num_weights: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The formats that the weights have in memory, and how they are multiplied."""
    kept = ops.kept_formats()
    rest = max(num_weights - sum(one["num_weights"] for one in kept), 0)
    name = dtype_name(dtype)
    plain = {"format": name, "num_weights": rest, "num_bytes": rest * dtype.itemsize, "product": name}
    return [*kept, plain]


def choose_capture(config: EngineConfig, device: torch.device, geometry: Geometry) -> Capture | None:
    """What makes CUDA graphs of small steps. None: every step is launched kernel by kernel."""
    if device.type != "cuda" or not config.cuda_graphs:
        return None
    slow = dict.fromkeys(choice.backend.name for choice in geometry.choices if not choice.backend.supports_graphs)
    if slow:
        logger.warning("steps are not captured as CUDA graphs: attention by %s can't be", ", ".join(slow))
        return None
    from ratoon.execution.graphs import CudaCapture

    return CudaCapture()


def device_responds(device: torch.device) -> bool:
    """Whether the device still executes work. The first call may report an error that is over by the second."""
    for _ in range(2):
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)
            return True
    return False


@contextmanager
def refusing_what_does_not_fit(
    source: str, num_weights: int, device: torch.device, dtype: torch.dtype
) -> Iterator[None]:
    """Raise ModelError if weights or tables do not fit in memory. torch has an exception class for this on GPUs
    only."""
    free = free_memory(device)
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if type(error) is RuntimeError and "can't allocate memory" not in str(error):
            raise
        problem = f"does not fit into the memory that is free: its weights are {gib(num_weights * dtype.itemsize)} in "
        problem += f"{dtype_name(dtype)}, and {gib(free)} of {device} were free"
        most = free // dtype.itemsize
        expected = f"a model of fewer than {most / 1e9:.1f} billion weights, a smaller max_model_len, or more memory"
        raise ModelError(source, problem, expected) from error


def return_freed_memory() -> None:
    """Return freed memory to the system. Allocators keep it for a while for reuse."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    # torch's CPU allocator releases memory some time after it was freed, but only at the next allocation.
    time.sleep(ALLOCATOR_PATIENCE)
    torch.empty(2**26, dtype=torch.uint8)
