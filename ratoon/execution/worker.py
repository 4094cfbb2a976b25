"""The worker: one device. Has its parts chosen (choices.py), loads the model, sizes the KV cache, owns the runner.

What it returns to its executor is data (core/worker.py): the executor may be in another process.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import asdict, replace

from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.core.errors import ConfigError, DeviceLostError, ModelError
from ratoon.core.kv import KVCacheConfig, SwapCosts
from ratoon.core.kv_chain import open_connectors
from ratoon.core.kv_connector import BlockMover, KVConnector, open_connector
from ratoon.core.media import MediaInput
from ratoon.core.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.structured import StructuredOutput
from ratoon.core.worker import Measurements, PoolSize, WeightFacts, WorkerChoices, WorkerFacts, WorkerStats
from ratoon.execution.adapter_slots import bytes_of_slots
from ratoon.execution.choices import WorkerParts, choose_capture, choose_parts
from ratoon.execution.devices import has_modes_of_its_own, on_stream, use_device
from ratoon.execution.drafting.build import BuiltDraft
from ratoon.execution.expert_load import ExpertLoad
from ratoon.execution.grammar.compiler import GrammarCompiler
from ratoon.execution.grammar.interface import GrammarLibrary
from ratoon.execution.kv.fingerprint import arithmetic_of, fingerprint_of, fingerprint_of_encoder
from ratoon.execution.kv.kv_memory import (
    cut_kv_memory,
    free_memory,
    gib,
    measure_encoder,
    measure_prefill,
    measure_step,
    sizes_by_memory,
    verify_longest_sequence,
)
from ratoon.execution.kv.kv_tensors import dtype_name
from ratoon.execution.passes.encoder_store import EncoderStore
from ratoon.execution.passes.media import encode_most
from ratoon.execution.passes.rehearsal import Rehearsal
from ratoon.layers.native_measurement import measure_kernels
from ratoon.layers.ops import Ops
from ratoon.layers.shard import WHOLE_MODEL, ModelPart
from ratoon.layers.weights import TensorSource
from ratoon.models.base import LanguageModel
from ratoon.models.build import shorten
from ratoon.models.digest import digest_of_model
from ratoon.observe.startup import StartupTimer

if TYPE_CHECKING:
    from ratoon.execution.passes.compile_ahead import CompileAhead
    from ratoon.execution.passes.graphs import Capture

logger = logging.getLogger(__name__)

SWITCH_SECONDS = 5e-5  # that a thread waits for the interpreter on CUDA, before it asks for it; Python has 5e-3

# Bytes. Smaller ones are loaded before the kernels are compiled; both need the interpreter, so they come second.
SMALL_WEIGHTS = 4 * 2**30

ALLOCATOR_PATIENCE = 0.3  # seconds


class Worker:
    """Comes up in phases, each a method that returns plain data: `choose`, `load`, `measure`, `allocate`, `warm_up`.
    The size of the pool is an argument: workers of one engine agree on it, from what each has measured."""

    _part = WHOLE_MODEL
    _rehearsal: Rehearsal | None = None  # what is left to be run in advance

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tensors: TensorSource,
        timer: StartupTimer,
        part: ModelPart = WHOLE_MODEL,
    ) -> None:
        """`part` is what this worker has of the model; other workers have the rest."""
        self._config = config
        self._model_config = model_config
        self._tensors = tensors
        self._timer = timer
        self._part = part
        self._stream: torch.cuda.Stream | None = None  # of all steps
        self._expert_load = ExpertLoad() if config.expert_metrics else None
        self._connector: KVConnector | None = None
        self._mover: BlockMover | None = None
        self._encoder_store: EncoderStore | None = None

    # ---- phases ----

    def choose(self) -> WorkerChoices:
        """Choose device, dtype, kernels and attention backends, and begin to compile the kernels of the first steps.
        What can't work is refused here, before memory is allocated."""
        cache = self._config.cache
        if self._config.encodes_only and self._model_config.media is None:
            problem = "this model has no encoder of images that engines could run for others"
            raise ConfigError("encode_engines", problem, "leave it out")
        if cache.connectors:
            self._connector = open_connectors(cache.connectors)
        self._choices = choices = choose_parts(self._config, self._model_config, self._tensors, self._part)
        self._device = choices.device
        self._kernels = compile_ahead(choices)
        self._chosen = WorkerChoices(
            max_model_len=choices.max_model_len,
            device=str(choices.device),
            dtype=dtype_name(choices.dtype),
            ops=choices.name_of_ops,
            attention=[choice.facts() for choice in choices.geometry.all_choices],
            num_threads=choices.num_threads,
            model=digest_of_model(self._model_config, self._tensors) if self._config.nnodes > 1 else "",
        )
        return self._chosen

    def load(self) -> WeightFacts:
        """Build the model with its weights."""
        self._model = self._load_model()
        self._draft = self._load_draft(self._model)
        formats = describe_weights(self._choices.ops, self._choices.num_weights, self._choices.dtype)
        return WeightFacts(sum(one["num_bytes"] for one in formats))

    def measure(self) -> Measurements:
        """Find out how many blocks there is room for. Nothing is allocated for them."""
        choices, timer = self._choices, self._timer
        measure_products(choices, timer)
        self._capture = choose_capture(choices, self._model)
        if self._kernels is not None:
            with timer.phase("compile kernels"):
                self._kernels.wait()
        step_bytes, token_seconds = measure(choices, self._model, self._draft, self._capture, timer)
        adapters = self._config.adapters
        adapter_bytes = bytes_of_slots(self._model, adapters.num_slots, adapters.max_lora_rank)
        beside = step_bytes + adapter_bytes + self._bytes_of_media()
        pool = cut_kv_memory(self._config.cache, choices.geometry, choices.device, beside)
        draft_tensors = None if choices.draft is None else choices.draft.tensors
        dtype = dtype_name(choices.dtype)
        on_cpu = choices.device.type == "cpu"
        arithmetic = arithmetic_of(self._config, self._model_config, choices.max_model_len, choices.ops, on_cpu)
        fingerprint = fingerprint_of(
            pool, choices.geometry, choices.tensors, dtype, draft_tensors, self._part, self._model_config, arithmetic
        )
        self._pool = replace(pool, fingerprint=fingerprint)
        size = PoolSize(self._pool.num_blocks, self._pool.num_host_blocks)
        self._measurements = Measurements(size, step_bytes, token_seconds)
        return self._measurements

    def allocate(self, pool: PoolSize) -> WorkerFacts:
        """Allocate the KV cache, and make the runner. `pool` is no larger than what was measured."""
        config, choices = self._config, self._choices
        with self._timer.phase("allocate the KV cache"):
            kv_config = replace(self._pool, num_blocks=pool.num_blocks, num_host_blocks=pool.num_host_blocks)
            if choices.device.type == "cuda":
                verify_longest_sequence(kv_config, config.cache, choices.max_model_len)
            on_cuda = choices.device.type == "cuda"
            vocab_size = self._model_config.vocab_size
            self.grammars = GrammarCompiler(partial(open_grammar_library, config, vocab_size, on_cuda))
            adapters = choices.make_adapter_slots(self._model)
            self.runner = choices.make_runner(
                self._model, kv_config, self._capture, self.grammars, adapters, self._draft
            )
        if self._connector is not None:
            self._mover = self._connector.open_mover(kv_config.fingerprint)
            self.runner.kv.connect(self._mover, has_ranks=config.num_ranks > 1)
        self._connect_encoder()
        del self._model, self._draft  # the runner's, which may put them to sleep
        formats = describe_weights(choices.ops, choices.num_weights, choices.dtype)
        return WorkerFacts(
            kv_config=kv_config,
            **{name: value for name, value in asdict(self._chosen).items() if name != "model"},
            weight_bytes=sum(one["num_bytes"] for one in formats),
            weight_formats=formats,
            kernel_choices=choices.kernels.facts(),
            kv_bytes=kv_config.num_blocks * kv_config.bytes_per_block,
            step_bytes=self._measurements.step_bytes,
            swap_costs=self._measure_swaps(kv_config, self._measurements.token_seconds),
            draft_cost=choices.draft_cost,
            encoder_address="" if self._encoder_store is None else self._encoder_store.address,
        )

    def warm_up(self) -> None:
        """Note what the first requests will need. It is done in moments without work, and only as far as kernels are in
        the cache: no start waits for it."""
        if self.runner.graphs is not None and self._model_config.generates:
            self.runner.graphs.expect_first_steps()
            if self.runner.encoder is None:
                self._rehearsal = Rehearsal(self.runner, self._config.scheduler.token_budget)

    # ---- parts of phases ----

    def _bytes_of_media(self) -> int:
        """The rows of the encoder cache, which is filled while requests with images or embeddings come. Of a pipeline,
        the first stage has them. On a CPU, nothing is set aside for the embeddings that a text model may read."""
        config = self._model_config
        reads_embeddings = config.causal and config.encoder is None
        if not reads_embeddings or not self._part.stage.is_first:
            return 0
        if config.media is None and self._device.type == "cpu":
            return 0
        num_rows = self._config.cache.encoder_cache_size
        num_bytes = num_rows * config.hidden_size * self._choices.dtype.itemsize
        logger.info("%s are kept for %s rows of embeddings in prompts", gib(num_bytes), f"{num_rows:,}")
        return num_bytes

    def _connect_encoder(self) -> None:
        """What the encoder of media makes is kept by connectors, too. Encoders are on the first stage."""
        config, shard = self._model_config, self._part.shard
        if config.media is None or not self._part.stage.is_first:
            return
        dtype = dtype_name(self._choices.dtype)
        kind = fingerprint_of_encoder(self._choices.tensors, dtype, config, shard.world_size, self._config)
        opened = [connector.open_encoder_store(kind) for connector in self._connectors_of_encoder()]
        if movers := [mover for mover in opened if mover is not None]:
            self._encoder_store = EncoderStore(movers, may_save=shard.rank == 0)
            self.runner.media.store = self._encoder_store

    def _connectors_of_encoder(self) -> list[KVConnector]:
        """Where engines of one client share outputs of encoders, that has connectors of its own: one between hosts, and
        one for a folder. Otherwise it is the connector of blocks."""
        cache = self._config.cache
        made = []
        if cache.encoder_listen is not None:
            links = {"listen": cache.encoder_listen, "encodes": self._config.encodes_only}
            made.append(open_connector("peers", links))
        if cache.encoder_folder is not None:
            files = {"folder": cache.encoder_folder, "max_bytes": cache.encoder_folder_bytes, "io": cache.kv_files_io}
            made.append(open_connector("files", files))
        return made or ([] if self._connector is None else [self._connector])

    def _load_model(self) -> LanguageModel:
        choices, timer = self._choices, self._timer
        num_bytes = choices.num_weights * choices.dtype.itemsize
        if self._kernels is not None and num_bytes < SMALL_WEIGHTS:
            with timer.phase("find kernels"):
                self._kernels.wait_until_recorded()
        fitting = refusing_what_does_not_fit(choices.tensors.name, choices.num_weights, choices.device, choices.dtype)
        with timer.phase("load weights"), torch.inference_mode(), fitting:
            return choices.build_model()

    def _load_draft(self, model: LanguageModel) -> BuiltDraft | None:
        choices, draft = self._choices, self._choices.draft
        if draft is None:
            return None
        fitting = refusing_what_does_not_fit(draft.tensors.name, draft.num_weights, choices.device, choices.dtype)
        with self._timer.phase("load what drafts"), torch.inference_mode(), fitting:
            return choices.build_draft(model)

    def _measure_swaps(self, kv_config: KVCacheConfig, token_seconds: float | None) -> SwapCosts | None:
        """`token_seconds`: that a token of a prompt takes. None: nothing is swapped."""
        if token_seconds is None:
            return None
        block_seconds = self.runner.kv.measure_swaps()
        if block_seconds is None:
            return None
        speed = kv_config.bytes_per_block / block_seconds / 1e9
        logger.info(
            "blocks are fetched from the host at %.1f GB/s, prompts are computed at %.0f tokens/s",
            speed,
            1 / token_seconds,
        )
        return SwapCosts(block_seconds, token_seconds)

    # ---- steps ----

    def enter_thread(self) -> None:
        """Called once, on the thread that will execute all steps. On CUDA it gets a stream of its own: graphs can't be
        captured on the default one. The interpreter then changes threads after microseconds, in the whole process: a
        step of a GPU takes a millisecond, and the thread that launches it or fills masks must not wait for one that
        takes results."""
        if self._device.type == "cuda":
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
            use_device(self._device)
            torch.cuda.synchronize()  # the weights were loaded on another stream
            self._stream = torch.cuda.Stream()
            torch.cuda.set_stream(self._stream)

    def on_lent_thread(self) -> AbstractContextManager[object] | None:
        """Around a step on another thread: the same stream. None for a thread with modes that would change the step,
        and on a CPU, where a step is the work itself and not its launch, and its threads are set up for one caller."""
        if self._stream is None or has_modes_of_its_own():
            return None
        return on_stream(self._stream)

    @property
    def stats(self) -> WorkerStats:
        graphs = self.runner.graphs
        experts = {} if self._expert_load is None else self._expert_load.take(self.runner.program.model)
        return WorkerStats(
            self.runner.num_computed_tokens,
            None if graphs is None else graphs.stats,
            experts,
            self.runner.media.num_runs,
        )

    def prepare_grammar(self, asked: StructuredOutput, owner: str | None) -> Future[Any]:
        """Compile the grammar of a request in another thread. The future raises RequestError if it can't be. Of a
        pipeline, only the last stage needs it."""
        if not self._part.stage.is_last:
            nothing: Future[Any] = Future()
            nothing.set_result(None)
            return nothing
        return self.grammars.prepare(asked, owner)

    def encode_media(self, inputs: dict[str, MediaInput]) -> None:
        """Run the encoder over these inputs, and keep what comes out where other engines find it."""
        with torch.inference_mode():
            self.runner.media.encode_for_others(self.runner.program.model, inputs)

    def fetch_media(self, places: dict[str, str]) -> Future[None] | None:
        """Begin to fetch outputs of the encoder from engines on other hosts. None: there is nothing to wait for."""
        return None if self._encoder_store is None else self._encoder_store.fetch(places)

    def close(self) -> None:
        self.grammars.shutdown()
        if self.runner.adapters is not None:
            self.runner.adapters.close()
        self.runner.kv.close()
        if self._mover is not None:
            self._mover.close()
        if self._encoder_store is not None:
            self._encoder_store.close()

    def recover(self) -> None:
        """A step failed, and none runs."""
        self.runner.kv.drop_fetches()

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.runner.execute_model(plan)

    def sample_tokens(self) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        return self.runner.sample_tokens()

    @property
    def has_idle_work(self) -> bool:
        return self._has_graphs_to_prepare or self._can_open_grammars

    @property
    def _can_open_grammars(self) -> bool:
        return self._part.stage.is_last and self.grammars.can_open_ahead

    @property
    def _has_graphs_to_prepare(self) -> bool:
        graphs = self.runner.graphs
        if graphs is None:
            return False
        return graphs.can_capture_next or ((graphs.can_run_ahead or self._can_rehearse) and self._has_kernels)

    @property
    def _can_rehearse(self) -> bool:
        return self._rehearsal is not None and self._rehearsal.can_go_on

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
        now. What is likelier to be needed comes first: the library of grammars is loaded before steps of many sizes are
        captured, which takes seconds."""
        if self.is_busy:
            return False
        graphs = self.runner.graphs if self._has_graphs_to_prepare else None
        is_rehearsing = graphs is not None and self._rehearsal is not None and self._rehearsal.can_go_on
        if self._can_open_grammars and not (graphs is not None and (graphs.can_capture_next or is_rehearsing)):
            if self.grammars.open_ahead() and self._rehearsal is not None:
                self._rehearsal.expect_grammars()
            return True
        if graphs is None:
            return False
        with torch.inference_mode():
            if graphs.can_capture_next:
                is_done = graphs.capture_next()
            elif self._rehearsal is not None and is_rehearsing:
                is_done = self._rehearsal.run_next()
            else:
                is_done = graphs.run_ahead()
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
        self._rehearsal = None
        self.runner.kv.release()
        self.runner.media.release()
        if self.runner.encoder is not None:
            self.runner.encoder.release()
        if self.runner.graphs is not None:
            self.runner.graphs.clear()
        if self.runner.recorded is not None:
            self.runner.recorded.clear()
        if self.runner.drafting is not None:
            self.runner.drafting.drafter.clear()
        if level >= 2:
            if self.runner.adapters is not None:
                self.runner.adapters.release()
            self.runner.detach_draft()
            del self.runner.program.model
        return_freed_memory()

    def wake_up(self) -> None:
        if not hasattr(self.runner, "model"):
            with torch.inference_mode():
                self.runner.program.model = model = self._choices.build_model()
                draft = self._choices.build_draft(model)
                if draft is not None:
                    self.runner.attach_draft(draft)
            if self.runner.adapters is not None:
                self.runner.adapters.reload(model)
        self.runner.kv.allocate()


def open_grammar_library(config: EngineConfig, vocab_size: int, on_cuda: bool) -> GrammarLibrary:
    """With the model's tokenizer, which the engine needs for nothing else. Beside a GPU it is used through the C
    interface, where that can be, with the threads of the CPU kernels: elsewhere steps need these. There forced text is
    found on request alone: with 32 schemas on an H200 the search takes more than half of the speed."""
    from ratoon.execution.grammar.llguidance_library import Llguidance
    from ratoon.models.source import resolve_model

    tokenizer = resolve_model(config.model, config.hf_overrides, config.model_backend).load_tokenizer()
    if on_cuda:
        from ratoon.execution.grammar.llguidance_c import open_library

        library = open_library(tokenizer, vocab_size)
    else:
        library = Llguidance(tokenizer, vocab_size)
    library.finds_forced_text = not on_cuda or config.scheduler.jump_forward is True
    if library.finds_forced_text:
        library.prepare()
    return library


def compile_ahead(choices: WorkerParts) -> CompileAhead | None:
    """Begin to compile the kernels of the first steps. None: they are compiled when they are launched."""
    if not choices.can_run_without_weights or choices.model_config.library is not None:
        return None
    from ratoon.execution.passes.compile_ahead import CompileAhead, capture_nothing
    from ratoon.execution.passes.cuda_driver import take_compiler

    largest = choices.largest_step()
    make_outline = partial(choices.make_outline, choices.geometry_anew(), choices.probe_for(largest), capture_nothing)
    return CompileAhead(make_outline, largest, choices.device, choices.num_threads, take_compiler())


def measure_products(choices: WorkerParts, timer: StartupTimer) -> None:
    """Choose the kernels of weights that have none yet: once for a machine and a shape."""
    if choices.kernels.unknown():
        with timer.phase("measure products"), torch.inference_mode():
            measure_kernels(choices.kernels, choices.num_threads)


def measure(
    choices: WorkerParts,
    model: LanguageModel,
    draft: BuiltDraft | None,
    capture: Capture | None,
    timer: StartupTimer,
) -> tuple[int, float | None]:
    """Before there is a KV cache: bytes that the largest step needs, and seconds that a token of a prompt takes; 0 and
    None where that decides nothing."""
    cache, step_bytes, token_seconds = choices.config.cache, 0, None
    if choices.can_run_without_weights and sizes_by_memory(cache):
        with timer.phase("measure the largest step"):
            largest = choices.largest_step()
            probe = choices.probe_for(largest)
            make = partial(choices.make_runner, shorten(model), probe, capture, draft=draft)
            step_bytes = measure_step(largest, probe.num_blocks * probe.bytes_per_block, make, choices.device)
    if choices.device.type == "cuda" and model.media_encoder is not None and sizes_by_memory(cache):
        with timer.phase("measure the encoder of images"), torch.inference_mode():
            num_rows = min(choices.config.scheduler.max_num_encoder_tokens, cache.encoder_cache_size)
            run = partial(encode_most, model, num_rows)
            step_bytes = max(step_bytes, measure_encoder(run, num_rows, choices.device))  # it runs before the decoder
    if choices.can_run_without_weights and cache.host_bytes and cache.preemption_mode == "auto":
        with timer.phase("measure a prompt"):
            plan = choices.one_prompt()
            make = partial(choices.make_runner, model, choices.probe_for(plan), capture, draft=draft)
            token_seconds = measure_prefill(plan, make, choices.device)
    return step_bytes, token_seconds


def describe_weights(ops: Ops, num_weights: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The formats that the weights have in memory, and how they are multiplied."""
    kept = ops.kept_formats()
    rest = max(num_weights - sum(one["num_weights"] for one in kept), 0)
    name = dtype_name(dtype)
    plain = {"format": name, "num_weights": rest, "num_bytes": rest * dtype.itemsize, "product": name}
    return [*kept, plain]


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
