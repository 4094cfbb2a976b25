"""The driver of small steps: they run from fixed memory, padded to a few sizes, so that each can be captured once as a
CUDA graph and replayed.

What is captured is the program of a key: without a graph it does the same, call by call.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch

from ratoon.attention.interface import FEW_TOKENS
from ratoon.core.config import ModelConfig
from ratoon.core.stats import GraphStats
from ratoon.execution.inputs.columns import NO_NAMES, names_of
from ratoon.execution.inputs.device_inputs import ColumnsOfRows, DeviceInputs
from ratoon.execution.inputs.prefix_runs import PrefixRunsOfRows, columns_of
from ratoon.execution.passes.cuda_driver import load_library
from ratoon.execution.passes.ends import End, Logits, MaskedTokens, Tokens
from ratoon.execution.passes.program import ProgramEnds, ProgramStep, StepProgram
from ratoon.execution.sampling.mask_column import MaskColumn
from ratoon.layers.sampling import Mode
from ratoon.layers.torch_internals import end_allocation_to_pool

Tensor = torch.Tensor

logger = logging.getLogger(__name__)

MAX_DECODES = 1024  # sequences of a decode step that is padded
MAX_TOKENS = 2048  # of another
# What a step's kernels take to be launched one by one, and what a large GPU computes meanwhile
LAUNCH_SECONDS_OF_LAYER = 300e-6
OPERATIONS_PER_SECOND = 600e12
REQUEST_SIZES = (2, 9, 33, 129)  # one more than is usual: padding has a request of its own
READ_SIZES = (0, 1, 8, 32, 128)  # rows that are read, if not all
RUN_SIZES = (1, 4, 16, 64)  # runs of requests that share a prefix
SHORT_SIZES = (8, 16, 24, 32)  # of the steps of one short continuation, which run once ahead of the first of them
EXPECTED_REQUESTS = 32  # that decode together
MAX_GRAPHS = 256
MIN_FREE_BYTES = 512 * 2**20  # of the device's memory: with less, no further graph is captured
MAX_FAILURES = 3  # captures that failed, after which none is tried


def graph_sizes(max_tokens: int) -> list[int]:
    """The sizes that steps are padded to, up to the first that holds `max_tokens`, or MAX_TOKENS. Few, because each is
    captured when it is first needed; from 32 on they are at most a quarter apart."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 1024, 64)]
    sizes += range(1024, MAX_TOKENS + 1, 128)
    return sizes[: bisect_left(sizes, max_tokens) + 1]


def max_prefill_tokens(config: ModelConfig) -> int:
    """Tokens up to which a step with prompts is padded: as many as are computed while the kernels are launched. With
    more of them launches are hidden behind the device's work, and padding would add to that."""
    attention = 2 * config.head_dim * (config.num_heads + config.num_kv_heads)
    weights_of_layer = config.hidden_size * (attention + 3 * config.intermediate_size)
    return int(LAUNCH_SECONDS_OF_LAYER * OPERATIONS_PER_SECOND / (2 * weights_of_layer))


class PaddedEnd(NamedTuple):
    end: End
    num_rows: int | None  # that are read for it, padded; None: all rows of the step, for its only end


class ChosenEnd(NamedTuple):
    """An end whose tokens are chosen once its masks are filled, behind a program that ends with its logits."""

    place: int  # among the program's ends
    end: MaskedTokens


class ProgramKey(NamedTuple):
    """What a graph is captured for."""

    size: int  # tokens, padded
    num_reqs: int | None  # padded; None: every request has one token
    ends: tuple[PaddedEnd, ...]
    num_layers: int | None = None  # that are run; None: all of them
    num_runs: int | None = None  # of requests that attend to a shared prefix together, padded; None: there are none
    columns: frozenset[str] = NO_NAMES  # the optional ones that the step has
    chosen: ChosenEnd | None = None  # whose tokens are chosen from the program's logits; None: the program itself
    has_few: bool = False  # no request has more than FEW_TOKENS, but for padding, which is attended to in part

    @property
    def max_query_len(self) -> int:
        if self.num_reqs is None:
            return 1
        return FEW_TOKENS if self.has_few else self.size

    @property
    def reads_all(self) -> bool:
        return len(self.ends) == 1 and self.ends[0].num_rows is None

    @property
    def program_ends(self) -> ProgramEnds:
        counts = [self.size if padded.num_rows is None else padded.num_rows for padded in self.ends]
        return ProgramEnds.of([padded.end for padded in self.ends], counts)


def sampling_key(size: int, num_reqs: int | None, num_rows: int | None, mode: Mode) -> ProgramKey:
    """The key of steps in which a token is chosen for each row that is read."""
    return ProgramKey(size, num_reqs, (PaddedEnd(Tokens(mode), num_rows),))


def padded_reqs(count: int, num_padding: int, size: int, max_model_len: int) -> int | None:
    """The number of requests of a step of `size` tokens that is no decode, of which `count` are real: more than these,
    because padding, so many tokens, has requests of its own. Few numbers, as for rows that are read. None: they are too
    many."""
    most = min(size, MAX_DECODES)
    if num_padding > max_model_len:  # a request of all padding would be longer than any may be
        return size if size == most else None
    return next((number for number in (*REQUEST_SIZES, most) if count < number <= most), None)


def padded_read(count: int, size: int) -> int:
    """The number of rows to read in a step of `size` tokens, of which `count` are wanted. Few numbers, because each is
    another graph: up to a hundred rows or so, logits cost what reading their weights costs."""
    most = min(size, MAX_DECODES)
    return min(most, next((number for number in READ_SIZES if number >= count), most))


def padded_runs(count: int, size: int) -> int:
    """The number of runs of requests that share a prefix, of which there are `count`, in a step of `size` tokens. The
    keys of few prefixes are divided among more programs."""
    return min(size, next((number for number in RUN_SIZES if number >= count), size))


# ---- capturing ----


class Captured(Protocol):
    """A function that was captured."""

    def replay(self) -> Any:
        """What the function returned, computed anew in the same memory."""
        ...


Capture = Callable[[Callable[[], Any]], Captured]


class CudaCapture:
    """Captures functions on the current stream, which must not be the default one. Graphs share a pool of memory: they
    are never replayed at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch's handle
        self._alive: WeakSet[CudaGraph] = WeakSet()

    def __call__(self, function: Callable[[], Any]) -> Captured:
        if not self._alive:  # a pool ends with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        graph = CudaGraph(function, self._pool)
        self._alive.add(graph)
        return graph


class CudaGraph:
    def __init__(self, function: Callable[[], Any], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # what it would free belongs to other streams
        torch.cuda.current_blas_handle()  # of this thread, which can't be made during a capture
        try:
            # Other threads may use the device meanwhile, to take results for example.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._result = function()
            finally:
                self._graph.capture_end()
        except BaseException:
            # Where ending a capture fails, torch leaves the allocator and its generator as they were during it.
            device = torch.cuda.current_device()
            with suppress(Exception):
                end_allocation_to_pool(device, pool)
            with suppress(Exception):
                generator = torch.cuda.default_generators[device]
                generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            if collects:
                gc.enable()
        upload(self._graph)

    def replay(self) -> Any:
        self._graph.replay()
        return self._result


def upload(graph: torch.cuda.CUDAGraph) -> None:
    """Bring a graph to the device now, which is otherwise a part of its first replay. Where that can't be done, nothing
    happens."""
    library = load_library()
    find_exec = getattr(graph, "raw_cuda_graph_exec", None)  # not in every torch
    if library is not None and find_exec is not None:
        stream = torch.cuda.current_stream().cuda_stream
        library.cuGraphUpload(ctypes.c_void_p(find_exec()), ctypes.c_void_p(stream))


class StepGraphs:
    """Runs padded steps by their key: the first time as it is, which also compiles the kernels, from the second time on
    as a graph, which is captured then, or before in a moment without work. So nothing is captured before the first
    token."""

    def __init__(
        self,
        sizes: list[int],
        run: Callable[[ProgramKey], Any],
        capture: Capture,
        max_prefill_tokens: int = MAX_TOKENS,
        send_padding: Callable[[], None] | None = None,
        choose: Callable[[ProgramKey, Tensor], Any] | None = None,
    ) -> None:
        """`send_padding`: bring a step without requests to the device, so that `run` computes padding alone. Without
        it, only steps that have run are captured in moments without work. `choose`: the tokens of an end, from the
        logits of a step that has run, under masks."""
        self.stats = GraphStats()
        self.has_prepared = False  # by the latest step: its kernels may have been compiled, or its graph was captured
        self._sizes = sizes
        self._max_prefill_tokens = max_prefill_tokens
        self._run = run
        self._capture = capture
        self._send_padding = send_padding
        self._choose = choose
        self._logits: Tensor | None = None  # that `choose` was called with
        self._graphs: dict[ProgramKey, Captured] = {}
        self._seen: dict[ProgramKey, None] = {}  # in the order of their first steps
        self._modes: set[Mode] = set()  # of steps that have run
        self._short_keys: list[ProgramKey] = []  # to be run ahead, the last first
        self._num_failures = 0

    def size_for(self, num_tokens: int, is_decode: bool = True) -> int | None:
        """The size that a step of so many tokens is padded to. None: they are too many."""
        if num_tokens > (MAX_DECODES if is_decode else min(self._max_prefill_tokens, MAX_TOKENS)):
            return None
        place = bisect_left(self._sizes, num_tokens)
        return self._sizes[place] if place < len(self._sizes) else None

    def size_of_few(self, num_tokens: int) -> int | None:
        """The size that a step is padded to whose requests have FEW_TOKENS at most, but not all of them one. None: they
        are too many for the few sizes of such steps."""
        return self.size_for(max(FEW_TOKENS, 1 << (num_tokens - 1).bit_length()), is_decode=False)

    def run(self, key: ProgramKey) -> Any:
        graph = self._graphs.get(key)
        self.has_prepared = graph is None
        if graph is None and key in self._seen:
            graph = self._try_capture(key)
            self.has_prepared = graph is not None  # else it runs as it is from now on
        if graph is not None:
            return graph.replay()
        results = self._run(key)
        self._note(key)  # not if it raised: what it compiles may be missing
        return results

    def choose(self, key: ProgramKey, end: ChosenEnd, logits: Tensor) -> Any:
        """The tokens of an end, from the logits that `run` has returned for the same step. They are captured only if
        the step is, so that the logits stay where they are."""
        chosen = key._replace(chosen=end)
        self._logits = logits
        graph = self._graphs.get(chosen)
        if graph is None and chosen in self._seen and key in self._graphs:
            graph = self._try_capture(chosen)
        if graph is not None:
            return graph.replay()
        results = self._run_key(chosen)
        self._seen[chosen] = None
        return results

    def _run_key(self, key: ProgramKey) -> Any:
        if key.chosen is None:
            return self._run(key)
        assert self._choose is not None and self._logits is not None
        return self._choose(key, self._logits)

    @property
    def can_capture_next(self) -> bool:
        num_left = sum(key.chosen is None and key not in self._graphs for key in self._seen)
        return num_left > 0 and len(self._graphs) < MAX_GRAPHS and self._num_failures < MAX_FAILURES

    def capture_next(self) -> bool:
        """Capture a step that has run once, the latest first. For moments without work: nothing is executed. False:
        nothing could be captured."""
        key = next((key for key in reversed(self._seen) if key not in self._graphs and key.chosen is None), None)
        return key is not None and self._try_capture(key) is not None

    def expect_first_steps(self) -> None:
        """Have the decode step of one request run ahead in each way to choose its token, and that of some more; behind
        these, the steps whose tokens are chosen under masks of grammars."""
        one, more = self.size_for(1), self.size_for(EXPECTED_REQUESTS)
        if self._send_padding is not None and one is not None:
            keys = [sampling_key(one, None, None, mode) for mode in (Mode.GREEDY, Mode.RANDOM, Mode.FILTERED)]
            if more is not None:
                keys += [sampling_key(more, None, None, mode) for mode in (Mode.GREEDY, Mode.FILTERED)]
            keys += [ProgramKey(size, None, (PaddedEnd(Logits(), None),)) for size in (one, more) if size is not None]
            self._short_keys += reversed(keys)

    @property
    def can_run_ahead(self) -> bool:
        return bool(self._short_keys) and self._num_failures < MAX_FAILURES

    def run_ahead(self) -> bool:
        """Run a first step, or one of a short continuation, with padding alone, so that it is captured next, before
        there is such a request. For moments without work. False: there is none left, or it can't be run."""
        while self._short_keys:
            key = self._short_keys.pop()
            if key in self._seen:
                continue
            assert self._send_padding is not None
            try:
                self._send_padding()
                self._run(key)
            except Exception:
                self._num_failures += 1
                logger.warning("a step of %d tokens could not be run in advance", key.size, exc_info=True)
                return False
            self._seen[key] = None
            return True
        return False

    def _note(self, key: ProgramKey) -> None:
        """A step has run. Short continuations will sample their tokens as it did."""
        self._seen[key] = None
        if self._send_padding is None:
            return
        for mode in {padded.end.mode for padded in key.ends if isinstance(padded.end, Tokens)} - self._modes:
            self._modes.add(mode)
            sizes = [size for size in reversed(SHORT_SIZES) if size in self._sizes and size <= self._max_prefill_tokens]
            short = [sampling_key(size, REQUEST_SIZES[0], padded_read(1, size), mode) for size in sizes]
            self._short_keys = short + self._short_keys

    def clear(self) -> None:
        """Drop all graphs: memory that they use is about to be freed."""
        self._graphs.clear()
        self._seen.clear()
        self._modes.clear()
        self._short_keys.clear()
        self.stats = GraphStats()

    def _try_capture(self, key: ProgramKey) -> Captured | None:
        if len(self._graphs) >= MAX_GRAPHS or self._num_failures >= MAX_FAILURES:
            return None
        free = free_bytes()
        if free is not None and free < MIN_FREE_BYTES:
            return None
        begin = time.perf_counter()
        try:
            graph = self._capture(partial(self._run_key, key))
        except Exception:  # the step itself is still to be run
            self._num_failures += 1
            logger.warning("a step of %d tokens can't be captured as a CUDA graph", key.size, exc_info=True)
            return None
        self._graphs[key] = graph
        after = free_bytes()
        self.stats.num_graphs += 1
        self.stats.seconds += time.perf_counter() - begin
        if free is not None and after is not None:
            self.stats.num_bytes += max(free - after, 0)
        logger.debug("captured %s: %s", key, self.stats)
        return graph


def free_bytes() -> int | None:
    """Returns how much of the device's memory is free; None without CUDA."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


class Graphs:
    """Runs small steps whose inputs are on the device, padded and by their keys."""

    def __init__(
        self, program: StepProgram, inputs: DeviceInputs, sizes: list[int], capture: Capture, masks: MaskColumn
    ) -> None:
        self._program = program
        self._inputs = inputs
        self._masks = masks
        self._prefix_runs = PrefixRunsOfRows(inputs.rows, program.kv.backends)
        self.steps = StepGraphs(
            sizes,
            self._run_padded,
            capture,
            max_prefill_tokens(program.model.config),
            inputs.send_padding,
            self._choose_padded,
        )

    @property
    def has_prepared(self) -> bool:
        return self.steps.has_prepared

    def run(self, step: ProgramStep) -> list[Any] | None:
        key = self._key_of(step)
        if key is None:
            return None
        batch, wanted = step.batch, step.wanted
        runs = self._prefix_runs.find(batch)
        if runs is not None:
            key = key._replace(num_runs=padded_runs(len(runs.firsts), key.size))
        of_rows: list[ColumnsOfRows] = []
        if key.reads_all:
            of_rows.append((slice(0, key.size), wanted[0].columns))
        else:
            places = key.program_ends.places
            of_rows += [(place, {"read_rows": each.rows, **each.columns}) for each, place in zip(wanted, places)]
        if runs is not None and key.num_runs is not None:
            of_rows.append((slice(None), columns_of(runs, key.num_runs)))
        if step.columns:
            of_rows.append((slice(None), self._inputs.bring(step.columns)))
        self._inputs.send(batch.rows, batch.num_scheduled, batch.unwritten, of_rows, batch.cu_num_tokens)
        results = self.steps.run(key)
        found = []
        for index, (each, result) in enumerate(zip(wanted, results)):
            count = len(each.rows)
            if isinstance(each.end, MaskedTokens):
                found.append(partial(self._choose, key, ChosenEnd(index, each.end), result, count))
            else:
                found.append(each.end.cut(result, count))
        return found

    def _key_of(self, step: ProgramStep) -> ProgramKey | None:
        """None: the step must run by calls."""
        if step.only_by_calls:
            return None
        num_tokens, count = step.num_tokens, len(step.batch.rows)
        is_decode = count == num_tokens
        longest = 1 if is_decode else int(step.batch.num_scheduled.max())
        # Lengths of drafts differ from step to step: few sizes, and one number of rows that are read.
        size = self.steps.size_of_few(num_tokens) if 1 < longest <= FEW_TOKENS else None
        has_one_read = size is not None
        if size is None:
            size = self.steps.size_for(num_tokens, is_decode)
        if size is None:
            return None
        num_reqs, has_few = None, False
        if not is_decode:
            num_reqs = padded_reqs(count, size - num_tokens, size, self._inputs.rows.max_model_len)
            if num_reqs is None:
                return None
            has_few = size > FEW_TOKENS >= longest
        columns = names_of(step.columns)
        if is_decode and step.reads_all:
            ends: tuple[PaddedEnd, ...] = (PaddedEnd(step.wanted[0].end.in_pass, None),)
            return ProgramKey(size, num_reqs, ends, columns=columns)
        ends = tuple(
            PaddedEnd(
                each.end.in_pass,
                min(size, MAX_DECODES)
                if has_one_read and each.end.needs_logits and len(each.rows) > 1
                else padded_read(len(each.rows), size),
            )
            for each in step.wanted
        )
        if sum(end.num_rows or 0 for end in ends) > self._inputs.max_rows or any(
            len(each.rows) > (end.num_rows or 0) for each, end in zip(step.wanted, ends)
        ):
            return None
        return ProgramKey(size, num_reqs, ends, step.num_layers, columns=columns, has_few=has_few)

    def _run_padded(self, key: ProgramKey) -> list[Any]:
        """The program of the step that `inputs.send` has brought to the device."""
        inputs, ends = self._inputs, key.program_ends
        num_reqs = key.size if key.num_reqs is None else key.num_reqs
        inputs.compute(key.size, num_reqs, 1 if key.num_reqs is None else key.size)  # padding may have all tokens
        step = inputs.padded(key.size, num_reqs, key.max_query_len, key.num_runs, key.columns)
        places = ends.places
        rows = None
        if not key.reads_all:
            rows = inputs.columns(slice(0, places[-1].stop if places else 0))["read_rows"]
        return self._program.run(step, ends, rows, [inputs.columns(place) for place in places], key.num_layers)

    def _choose(self, key: ProgramKey, end: ChosenEnd, logits: Tensor, count: int) -> Any:
        return self.steps.choose(key, end, logits)[:count]

    def _choose_padded(self, key: ProgramKey, logits: Tensor) -> Any:
        assert key.chosen is not None
        place, end = key.chosen
        return end.choose(logits, self._inputs.columns(key.program_ends.places[place]), self._masks.words)
