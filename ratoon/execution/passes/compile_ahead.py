"""Compiles the kernels of the first steps on CUDA while the weights are loaded: a runner on the meta device executes
such steps, and what it launches is compiled (layers/triton/compilation.py). Imported on CUDA only, with Triton.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.overrides import TorchFunctionMode

from ratoon.attention.interface import FEW_TOKENS
from ratoon.core.params import SamplingParams
from ratoon.core.plan import NewRequestData, SchedulerOutput
from ratoon.execution.devices import use_device
from ratoon.execution.kv.block_kernels import FEW_BLOCKS, Pages, copy_blocks
from ratoon.execution.model_runner import ModelRunner
from ratoon.execution.passes.ends import BeamKeys, Logits
from ratoon.execution.passes.graphs import (
    MAX_TOKENS,
    REQUEST_SIZES,
    Captured,
    PaddedEnd,
    ProgramKey,
    graph_sizes,
    padded_runs,
    sampling_key,
)
from ratoon.layers.beams import SearchShape, best_keys_of_shape
from ratoon.layers.sampling import Mode, sample_plain, token_logprobs
from ratoon.layers.triton.compilation import compile_launches, is_marked, mark_of, send_launches
from ratoon.layers.triton.compiler_process import CompilerProcess, Finish
from ratoon.layers.triton.penalties import apply_penalties, count_tokens

if TYPE_CHECKING:
    from ratoon.execution.inputs.device_inputs import DeviceInputs

logger = logging.getLogger(__name__)

# Tokens of prompts, which differ in kernels by ranges; that of long ones takes longest to compile.
FIRST_PROMPTS = (128, 32, 16, 64)
FEW_ROWS = 128  # up to which all sizes of steps are launched
MANY_ROWS = (256, 1024)
NUMS_BEAMS = (32, 4, 8, 16)  # kernels differ by how many are wanted
NUMS_STOP_TOKENS = (0, 2)  # of a search, beside one: each makes it want as many candidates more as it has beams
NUMS_LOGPROBS = (5, 20)  # alternatives: narrow and wide lists
NUMS_SHARING = (32, 2)  # requests that share a prefix: enough to read it once, and too few
SHARED_TOKENS = 1024


class ShapesOnly(TorchFunctionMode):
    """Shapes on the meta device, without torch's own way to them where that imports its compiler, which takes longer
    than all the rest."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        if name.endswith("_") and not name.endswith("__"):  # in place
            return args[0]
        if kwargs and kwargs.get("out") is not None:
            return kwargs["out"]
        if name == "linear":
            x, weight = args[:2]
            return x.new_empty(*x.shape[:-1], weight.shape[0])
        if name == "embedding":
            rows, table = args[:2]
            return table.new_empty(*rows.shape, table.shape[1])
        if name == "empty_like":
            return args[0].new_empty(args[0].shape, **(kwargs or {}))
        if name == "__getitem__" and isinstance(args[1], torch.Tensor):
            table, rows = args
            return table.new_empty(*rows.shape, *table.shape[1:])
        return function(*args, **(kwargs or {}))


class CompileAhead:
    """Compiles in another process if there is one, and in threads otherwise. What fails is compiled when it is
    launched, or fails again there."""

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        largest: SchedulerOutput,
        device: torch.device,
        num_cores: int,
        process: CompilerProcess | None,
    ) -> None:
        """`make_runner`: on the meta device. `largest`: the step that is measured. `process`: ends when all is done."""
        self._device = device
        self._num_cores = num_cores
        self._process = process
        self._first = partial(_without_memory, lambda: launch_first_steps(make_runner(), largest))
        self._later = partial(_without_memory, lambda: launch_later_steps(make_runner()))
        self._is_recorded = Event()
        self._thread = Thread(target=self._run_first, name="ratoon-compile-ahead", daemon=True)
        self._thread.start()

    def wait_until_recorded(self) -> None:
        """Until the kernels of the first steps are known. Then the interpreter is free."""
        self._is_recorded.wait()

    def wait(self) -> None:
        """Until the kernels of the first steps are loaded."""
        self._thread.join()

    @property
    def has_ended(self) -> bool:
        """Whether the kernels of later steps are in the cache as well, and are not to be compiled when they are
        launched."""
        return self._process is not None and self._process.has_finished

    def _run_first(self) -> None:
        begin = time.perf_counter()
        try:
            use_device(self._device)
            num_kernels = compile_launches(self._first, self._num_cores, self._load, self._process, self._go_on)
        except Exception as error:  # of a kernel, or of a layer that can't run without memory
            logger.info(
                "kernels are compiled when they are first launched: %s",
                error,
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
            if self._process is not None:
                self._process.send(Finish())
            return
        finally:
            self._is_recorded.set()
        logger.info("%d kernels were compiled ahead in %.1f s", num_kernels, time.perf_counter() - begin)

    def _go_on(self, keys: Sequence[str]) -> None:
        """`keys`: of the kernels of the first steps. While they are waited for, find those of later steps, unless a
        start before this one had all of them compiled."""
        self._is_recorded.set()
        if self._process is None:
            return
        mark = mark_of(keys)
        if is_marked(mark):
            self._process.send(Finish())
        else:
            Thread(
                target=self._send_later, args=(self._process, mark), name="ratoon-compile-later", daemon=True
            ).start()

    def _send_later(self, process: CompilerProcess, mark: str) -> None:
        try:
            use_device(self._device)
            send_launches(self._later, process)
        except Exception as error:
            logger.debug("kernels of later steps are compiled when they are first launched: %s", error, exc_info=True)
        process.send(Finish(mark))

    def _load(self, kernel: Any) -> None:
        """Makes the function that launches a compiled kernel, and loads the kernel to the device."""
        use_device(self._device)
        kernel.run  # noqa: B018 (done on access)


def _without_memory(launch: Callable[[], None]) -> None:
    with torch.inference_mode(), ShapesOnly():
        launch()


def launch_first_steps(runner: ModelRunner, largest: SchedulerOutput) -> None:
    """What the first requests need: decoding, whose attention takes longest to compile but for that of long prompts,
    a prompt, the step that is measured. `runner` is on the meta device, has run nothing, and pads steps."""
    _launch_decodes(runner, (1,), (Mode.GREEDY, Mode.RANDOM))
    _launch_prompts(runner, FIRST_PROMPTS)
    runner.execute_model(largest)
    runner.sample_tokens()


def launch_later_steps(runner: ModelRunner) -> None:
    """What other requests may need, the likeliest first: filters of the draw, which most models' settings have and
    which take longest to compile, more requests at once, continuations and beams, then the other ways to choose tokens.
    Kernels differ from size to size while a step has few rows."""
    assert runner.graphs is not None
    _launch_decodes(runner, (1,), (Mode.FILTERED,))
    sizes = [size for size in graph_sizes(MAX_TOKENS) if size <= FEW_ROWS]
    _launch_decodes(runner, (32, *sizes, *MANY_ROWS), (Mode.GREEDY,))
    _launch_prompts(runner, [size for size in sizes if size > 1])
    for num_reqs in (*REQUEST_SIZES[:-1], FEW_TOKENS):  # that check drafts, or go on by a few tokens
        tokens = FEW_TOKENS if num_reqs <= FEW_TOKENS else (num_reqs - 1) * FEW_TOKENS
        if (size := runner.graphs.size_of_few(tokens)) is not None:
            few = sampling_key(size, num_reqs, size if num_reqs > 2 else 1, Mode.GREEDY)
            _launch_padded(runner, few._replace(has_few=size > FEW_TOKENS))
    if (size := runner.graphs.size_for(FEW_ROWS)) is not None:  # many requests, some of more than one token
        _launch_padded(runner, sampling_key(size, size, 1, Mode.GREEDY))
    _launch_beams(runner)
    _launch_candidates(runner)
    _launch_decodes(runner, (1,), (Mode.RANDOM,))
    _launch_logprobs(runner)
    _launch_shared_prefix(runner)
    _launch_edits(runner)


def _launch_decodes(runner: ModelRunner, nums_seqs: Sequence[int], modes: Sequence[Mode]) -> None:
    assert runner.graphs is not None
    sizes = [runner.graphs.size_for(num_seqs) for num_seqs in nums_seqs]
    for size in dict.fromkeys(size for size in sizes if size is not None):
        for mode in modes:
            _launch_padded(runner, sampling_key(size, None, None, mode))


def _launch_padded(runner: ModelRunner, key: ProgramKey) -> None:
    assert runner.graphs is not None
    runner.graphs.clear()  # a step that it has seen would be captured
    runner.graphs.run(key)


def _launch_prompts(runner: ModelRunner, lengths: Sequence[int]) -> None:
    assert runner.graphs is not None
    rows = runner.input_batch
    for length in lengths:
        if length < rows.max_model_len and runner.graphs.size_for(length) is not None:
            _launch_step(runner, step_of([(0, length)], rows.block_sizes))


def _launch_step(runner: ModelRunner, plan: SchedulerOutput) -> None:
    assert runner.graphs is not None
    runner.graphs.clear()
    runner.execute_model(plan)  # tokens are sampled in it if it is padded; they can't be read
    runner.execute_model(SchedulerOutput(finished_req_ids=list(plan.num_scheduled_tokens)))


def _launch_beams(runner: ModelRunner) -> None:
    """Steps of a search, and the copies of blocks when beams part."""
    assert runner.graphs is not None
    for num_beams in NUMS_BEAMS:
        size = runner.graphs.size_for(num_beams)
        if size is not None:
            end = PaddedEnd(BeamKeys(SearchShape(1, num_beams, 2 * num_beams)), None)
            _launch_padded(runner, ProgramKey(size, None, (end,)))
    pages = Pages([torch.empty(4, 1, dtype=torch.int64, device=runner.device)], runner.device)
    for num_copies in (1, FEW_BLOCKS + 1):
        copy_blocks(pages, pages, [(0, 1)] * num_copies)


def _launch_candidates(runner: ModelRunner) -> None:
    """Launches searches that want more or fewer candidates than those of `_launch_beams`, and the step of their
    prompt, which has one row."""
    assert runner.graphs is not None
    inputs = cast("DeviceInputs", runner.inputs)
    runner.graphs.clear()
    (logits,) = runner.graphs.run(ProgramKey(1, None, (PaddedEnd(Logits(), None),)))
    for num_stop_tokens in NUMS_STOP_TOKENS:
        for num_beams in NUMS_BEAMS:
            num_wanted = 1 << (num_beams * (1 + num_stop_tokens) - 1).bit_length()
            for num_rows in (num_beams, 1):
                if num_rows <= len(runner.input_batch.token_ids):
                    columns = inputs.columns(slice(0, num_rows))
                    bounds = columns["search_starts"][:1], columns["search_stops"][:1]
                    rows = logits.new_empty(num_rows, logits.shape[1])
                    best_keys_of_shape(rows, columns["beam_scores"], bounds, SearchShape(1, num_rows, num_wanted))


def _launch_logprobs(runner: ModelRunner) -> None:
    assert runner.graphs is not None
    runner.graphs.clear()
    (logits,) = runner.graphs.run(ProgramKey(1, None, (PaddedEnd(Logits(), None),)))
    token_ids = torch.empty(1, dtype=torch.int64, device=runner.device)
    for num_top in NUMS_LOGPROBS:
        token_logprobs(logits, token_ids, num_top)


def _launch_edits(runner: ModelRunner) -> None:
    """Penalties, and the choice from logits that rules have changed, which are float32."""
    device, vocab_size = runner.device, runner.model.config.vocab_size
    logits, occurred = (
        torch.empty(1, vocab_size, dtype=dtype, device=device) for dtype in (torch.float32, torch.int16)
    )
    places = torch.empty(1, dtype=torch.int64, device=device)
    apply_penalties(logits, places, places, torch.empty(1, 3, device=device), occurred)
    count_tokens(occurred, places, places, places)
    of_rows = [torch.empty(1, dtype=dtype, device=device) for dtype in (torch.float32, torch.int64, torch.float64)]
    temperature, top_k, top_p = of_rows
    for mode in Mode:
        sample_plain(logits, temperature, top_k, top_p, min_p=temperature, uniforms=top_p, mode=mode)


def _launch_shared_prefix(runner: ModelRunner) -> None:
    """Requests that share a prefix: in steps that are padded, and beside a prompt in one that is too large for it."""
    assert runner.graphs is not None
    sizes = [runner.graphs.size_for(num_sharing) for num_sharing in NUMS_SHARING]
    for size in [size for size in sizes if size is not None]:
        for num_runs in (1, padded_runs(size, size)):
            _launch_padded(runner, sampling_key(size, None, None, Mode.GREEDY)._replace(num_runs=num_runs))
    rows, inputs = runner.input_batch, cast("DeviceInputs", runner.inputs)
    longest = rows.max_model_len - 1
    for num_sharing in NUMS_SHARING:
        length = min(len(inputs.prepared["input_ids"]) - num_sharing, longest)
        is_padded = runner.graphs.size_for(length + num_sharing, is_decode=False) is not None
        if length > 0 and not is_padded and num_sharing < len(rows.token_ids):
            requests = [(min(SHARED_TOKENS, longest - 1), 1)] * num_sharing + [(0, length)]
            _launch_step(runner, step_of(requests, rows.block_sizes))


def step_of(requests: Sequence[tuple[int, int]], block_sizes: Iterable[int]) -> SchedulerOutput:
    """Requests of so many computed and new tokens, all in one block, and the next token of each."""
    plan = SchedulerOutput()
    for index, (num_computed, length) in enumerate(requests):
        total, name = num_computed + length, f"request {index}"
        blocks = tuple([1] * int(-(-total // block_size)) for block_size in block_sizes)
        params = SamplingParams(temperature=0.0)
        plan.scheduled_new_reqs.append(NewRequestData(name, [0] * total, total, params, 0, blocks, num_computed))
        plan.num_scheduled_tokens[name] = length
        plan.sampled_req_ids.append(name)
        plan.total_num_scheduled_tokens += length
    return plan


def capture_nothing(function: Callable[[], torch.Tensor | None]) -> Captured:
    """A Capture for a runner whose steps are never repeated."""
    raise RuntimeError("a step without memory can't be captured")
