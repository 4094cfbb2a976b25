"""What settings and model decide before memory is allocated: device, dtype, kernels and attention backends, and how
models and runners are made of them. What can't work is refused here."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ratoon.attention.cpu import CpuAttentionBackend
from ratoon.attention.cpu_states import CpuStateBackend
from ratoon.core.config import EngineConfig, ModelConfig, resolve_max_model_len
from ratoon.core.errors import ConfigError
from ratoon.core.kv import KVCacheConfig
from ratoon.core.machine import usable_cores
from ratoon.core.plan import SchedulerOutput
from ratoon.execution.adapter_slots import AdapterSlots, open_slots
from ratoon.execution.device_kinds import BITS_OF_FLOATS, BUILT_IN, DeviceKind, OpsSettings, open_device
from ratoon.execution.devices import gpu_name, keep_freed_memory, resolve_dtype, use_device
from ratoon.execution.drafting.build import BuiltDraft, DraftParts, open_draft
from ratoon.execution.grammar.compiler import GrammarCompiler
from ratoon.execution.kv.geometry import Geometry, geometry_of
from ratoon.execution.kv.kv_memory import largest_step, num_blocks_of, one_prompt
from ratoon.execution.model_runner import ModelRunner
from ratoon.layers.native import kernel_set_name, library
from ratoon.layers.native_choices import KernelChoices, choices_file, this_machine
from ratoon.layers.native_ops import NativeOps, set_native_threads
from ratoon.layers.ops import Ops
from ratoon.layers.shard import WHOLE_MODEL, ModelPart
from ratoon.layers.weights import TensorSource
from ratoon.models.base import LanguageModel
from ratoon.models.build import META, build_model, count_weights, declare_model, outline_model

if TYPE_CHECKING:
    from ratoon.execution.passes.graphs import Capture

logger = logging.getLogger(__name__)

MATRICES_TO_LOOK_AT = 4
MATCHING_THREADS = 4  # of the CPU kernels on a GPU's host, where they match grammars alone; they spin between steps
OLDEST_WITH_FP8 = (8, 9)  # compute capability
KV_DTYPES = {  # by the setting `kv_cache_dtype`, which may also be "auto"
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "float32": torch.float32,
    "float16": torch.float16,
    "int8": torch.int8,
}


@dataclass(frozen=True)
class WorkerParts:
    config: EngineConfig
    model_config: ModelConfig
    tensors: TensorSource
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    num_threads: int
    ops: Ops
    kernels: KernelChoices  # of products with quantised weights, on a CPU
    kv_dtype: torch.dtype | None  # None: `dtype`
    declaration: LanguageModel  # without weights
    whole: LanguageModel  # the same with the layers of all stages
    geometry: Geometry
    part: ModelPart  # of the model, which this worker has
    draft: DraftParts | None = None  # a model or head that drafts beside it

    @cached_property
    def num_weights(self) -> int:
        """Counts the weights of the model and of what drafts beside it."""
        drafting = 0 if self.draft is None else self.draft.num_weights
        return count_weights(self.model_config, self.tensors, self.part) + drafting

    @property
    def draft_cost(self) -> float:
        """What a drafted token costs in steps of the model: what is read of weights for it, by number."""
        if self.draft is None:
            return 0.0
        return self.draft.num_weights / max(1, self.num_weights - self.draft.num_weights)

    @property
    def name_of_ops(self) -> str:
        return f"native ({kernel_set_name()})" if self.ops.name == "native" else self.ops.name

    @property
    def can_run_without_weights(self) -> bool:
        """Whether steps can be run before the engine is complete, to compile their kernels and to measure them. A stage
        of a pipeline can't run a step without the others."""
        is_decoder = self.model_config.generates and not self.model_config.encoder
        return self.device.type == "cuda" and is_decoder and self.part.stage.count == 1

    # ---- steps that are run at start-up ----

    def largest_step(self) -> SchedulerOutput:
        return largest_step(self.config.scheduler, *self._sizes_of_steps)

    def one_prompt(self) -> SchedulerOutput:
        return one_prompt(self.config.scheduler, *self._sizes_of_steps)

    @property
    def _sizes_of_steps(self) -> tuple[list[int], int]:
        return [group.spec.block_size for group in self.geometry.groups], self.max_model_len

    def geometry_anew(self) -> Geometry:
        """With other backends: these keep memory between steps."""
        return choose_geometry(
            self.config, self.declaration, self.whole, self.device, self.dtype, self.kv_dtype, self.draft
        )

    def probe_for(self, plan: SchedulerOutput) -> KVCacheConfig:
        """A pool that is just large enough for the plan."""
        block_size, geometry = self.config.cache.block_size, self.geometry
        return KVCacheConfig(num_blocks_of(plan), block_size, geometry.groups, attached=geometry.attached)

    # ---- what is built ----

    def build_model(self) -> LanguageModel:
        model = build_model(
            self.model_config, self.tensors, self.ops, self.device, self.dtype, self.max_model_len, self.part,
            self.config.expert_metrics,
        )  # fmt: skip
        if self.config.adapters.num_slots:
            open_slots(model, self.config.adapters.num_slots, self.config.adapters.max_lora_rank)
        return model

    def make_adapter_slots(self, model: LanguageModel) -> AdapterSlots | None:
        """None: the engine serves the model alone."""
        config = self.config.adapters
        if not config.num_slots:
            return None
        return AdapterSlots(model, self.tensors.shapes(), config.num_slots, config.max_lora_rank, self.device)

    def build_draft(self, model: LanguageModel) -> BuiltDraft | None:
        """What drafts beside this model; None: nothing does."""
        return None if self.draft is None else self.draft.build(model, self.ops, self.device, self.dtype)

    def make_runner(
        self,
        model: LanguageModel,
        kv_config: KVCacheConfig,
        capture: Capture | None,
        grammars: GrammarCompiler | None = None,
        adapters: AdapterSlots | None = None,
        draft: BuiltDraft | None = None,
    ) -> ModelRunner:
        return self._runner(model, self.geometry, kv_config, self.device, capture, grammars, adapters, draft)

    def make_outline(self, geometry: Geometry, kv_config: KVCacheConfig, capture: Capture) -> ModelRunner:
        """A runner of the same kind on the meta device. `geometry`: with backends of its own."""
        outline = outline_model(
            self.model_config, self.tensors, self.ops, self.dtype, self.max_model_len, self.part.shard
        )
        return self._runner(outline, geometry, kv_config, META, capture)

    def _runner(
        self,
        model: LanguageModel,
        geometry: Geometry,
        kv_config: KVCacheConfig,
        device: torch.device,
        capture: Capture | None,
        grammars: GrammarCompiler | None = None,
        adapters: AdapterSlots | None = None,
        draft: BuiltDraft | None = None,
    ) -> ModelRunner:
        scheduler = self.config.scheduler
        return ModelRunner(
            model,
            [choice.backend for choice in geometry.choices],
            kv_config,
            dtype=self.dtype,
            device=device,
            max_model_len=self.max_model_len,
            max_num_reqs=scheduler.max_num_seqs,
            max_num_tokens=max(scheduler.token_budget, scheduler.max_num_seqs),
            encoder_backend=None if geometry.encoder_choice is None else geometry.encoder_choice.backend,
            encoder_may_round=encoder_may_round(self.config),
            inputs_on_device=device.type != "cpu",
            capture=capture,
            record=self.ops.name == "native" and may_repeat(model, "can_be_recorded"),
            grammars=grammars,
            jump_forward=device.type == "cpu" if scheduler.jump_forward is None else scheduler.jump_forward,
            has_adapters=self.config.adapters.num_slots > 0,
            adapters=adapters,
            by_rejection=self.config.speculation.acceptance == "rejection",
            draft=draft,
            draft_backends=[choice.backend for choice in geometry.attached_choices],
        )


def choose_parts(
    config: EngineConfig, model_config: ModelConfig, tensors: TensorSource, part: ModelPart = WHOLE_MODEL
) -> WorkerParts:
    """Chooses what a worker is made of, and sets the device and the threads of this process. Raises ConfigError."""
    kind, device = open_device(config.device)
    use_device(device)
    dtype = resolve_dtype(config.dtype, device, model_config)
    max_model_len = resolve_max_model_len(config.max_model_len, model_config)
    threads = config.num_threads or usable_cores()
    set_native_threads(threads if device.type == "cpu" else min(threads, MATCHING_THREADS))
    if device.type == "cpu":
        keep_freed_memory()
    if config.num_threads is not None:  # otherwise torch's default stays: this process may use torch elsewhere
        torch.set_num_threads(threads)
    kernels = open_kernel_choices(config.measure_kernels, threads)
    ops = choose_ops(device, dtype, config.batch_invariant, config.quantization, kernels, kind)
    if model_config.library is not None:
        logger.warning(
            "%s runs through the Transformers library: slower than a native model, without recorded passes and graphs",
            model_config.architecture,
        )
    declaration = declare_model(model_config, max_model_len, part)
    whole = declaration
    if part.stage.count > 1:
        whole = declare_model(model_config, max_model_len, ModelPart(part.shard))
    kv_dtype = choose_kv_dtype(config, ops, tensors)
    draft: DraftParts | None = None
    source = config.speculation.on_device
    if source is not None:
        draft = open_draft(source.kind, source.path, model_config, declaration, max_model_len, part)
    geometry = choose_geometry(config, declaration, whole, device, dtype, kv_dtype, draft)
    for choice in geometry.all_choices:
        is_fast = isinstance(choice.backend, (CpuAttentionBackend, CpuStateBackend))
        is_slow = ops.name == "native" and config.attention_backend == "auto" and not is_fast
        logger.log(logging.WARNING if is_slow else logging.INFO, "attention of %s", choice)
    return WorkerParts(
        config,
        model_config,
        tensors,
        device,
        dtype,
        max_model_len,
        threads,
        ops,
        kernels,
        kv_dtype,
        declaration,
        whole,
        geometry,
        part,
        draft,
    )


def choose_kv_dtype(config: EngineConfig, ops: Ops, tensors: TensorSource) -> torch.dtype | None:
    """Returns the dtype in which keys and values are kept; None: the dtype of the model. Beside weights of 8 bits or
    fewer, that is float16 on a CPU: a decode step of many requests reads more of keys and values than of weights, and
    what they lose is far below what the weights' bits lose."""
    if config.cache.kv_cache_dtype != "auto":
        return KV_DTYPES[config.cache.kv_cache_dtype]
    return torch.float16 if isinstance(ops, NativeOps) and _has_few_bits(ops, tensors) else None


def _has_few_bits(ops: NativeOps, tensors: TensorSource) -> bool:
    """Whether products are computed with quantised weights. The smallest matrices tell: reading them takes no time."""
    if ops.formats is None or ops.bits is not None:
        return ops.bits is not None
    matrices = [name for name, shape in tensors.shapes().items() if len(shape) == 2]
    smallest = sorted(matrices, key=lambda name: math.prod(tensors.shapes()[name]))[:MATRICES_TO_LOOK_AT]
    return any(ops.formats.find(tensors.read(name)) is not None for name in smallest)


def encoder_may_round(config: EngineConfig) -> bool:
    """Whether the attention of an encoder, of audio or of images, may round to bf16: where the weights of the model are
    quantised on request, which loses far more."""
    return config.quantization in BITS_OF_FLOATS


def choose_geometry(
    config: EngineConfig,
    declaration: LanguageModel,
    whole: LanguageModel,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    draft: DraftParts | None = None,
) -> Geometry:
    return geometry_of(
        declaration,
        config.attention_backend,
        config.cache.block_size,
        device,
        dtype,
        kv_dtype,
        config.batch_invariant,
        encoder_may_round=encoder_may_round(config),
        whole=whole,
        draft_layers=() if draft is None else draft.layers,
        state_interval=config.cache.state_interval,
    )


def open_kernel_choices(measured: bool, num_threads: int) -> KernelChoices:
    """Returns the choices of kernels that were kept for this machine, or the fixed ones."""
    if not measured or library() is None:
        return KernelChoices(None)
    machine = this_machine(num_threads)
    return KernelChoices(machine, choices_file(machine))


def choose_ops(
    device: torch.device,
    dtype: torch.dtype,
    batch_invariant: bool = False,
    quantization: str = "auto",
    kernels: KernelChoices | None = None,
    kind: DeviceKind | None = None,
) -> Ops:
    """The fastest that serve this device and dtype, on a device of this kind; None: of the built-in one of its type.
    Raises ConfigError if they can't do what is asked for."""
    if batch_invariant and quantization == "fp8":
        raise ConfigError("batch_invariant", "sums depend on the batch with quantization fp8", "one of the two")
    settings = OpsSettings(batch_invariant, quantization, kernels)
    ops = (kind or BUILT_IN[device.type]).make_ops(device, dtype, settings)
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


def may_repeat(model: LanguageModel, allowed: str) -> bool:
    """Whether steps may be repeated without calling the model: it holds no collective, or one with this property."""
    if not model.can_be_repeated:
        return False
    return not model.communicating_parts or bool(getattr(model.shard.collective, allowed))


def choose_capture(parts: WorkerParts, model: LanguageModel) -> Capture | None:
    """What makes CUDA graphs of small steps. None: every step is launched kernel by kernel."""
    geometry = parts.geometry
    if parts.device.type != "cuda" or not parts.config.cuda_graphs:
        return None
    if not model.can_be_repeated:
        logger.info("steps are not captured as CUDA graphs: the model is called by the Transformers library")
        return None
    if parts.part.stage.count > 1:
        logger.warning("steps are not captured as CUDA graphs: a stage waits in them for rows of another")
        return None
    if not may_repeat(model, "can_be_captured"):
        logger.warning("steps are not captured as CUDA graphs: the collective of the ranks can't be")
        return None
    slow = dict.fromkeys(choice.backend.name for choice in geometry.choices if not choice.backend.supports_graphs)
    if slow:
        logger.warning("steps are not captured as CUDA graphs: attention by %s can't be", ", ".join(slow))
        return None
    from ratoon.execution.passes.graphs import CudaCapture

    return CudaCapture()
