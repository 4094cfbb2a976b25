"""Records when the parts of a step ran, on which thread: methods of a running engine are wrapped while it records.
Also what a step on a CPU spends its time on, by kind of work: the rows of the table of `ratoon bench profile`.

Nothing is added to the engine itself, so it costs nothing when no timeline is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.api.llm import LLM

DEVICE, KERNELS, STEPS, CORE = "device", "kernels", "steps thread", "core thread"
LANES = (DEVICE, KERNELS, STEPS, CORE)  # kernels are those of a CPU, which the steps thread calls
NOT_OF_A_PASS = ("ratoon_run_program", "ratoon_time_program", "ratoon_quantised_scratch", "ratoon_packed_size")
WAIT = "wait"  # the core's thread has nothing to do until the oldest step has ended


@dataclass(frozen=True, slots=True)
class Span:
    """Times in microseconds; from which moment on is the recorder's."""

    lane: str
    name: str
    begin: float
    end: float


class SpanRecorder:
    """Spans of the host's threads, by the clock `now`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @staticmethod
    def now() -> float:
        return time.perf_counter_ns() / 1e3

    @contextmanager
    def recording(self, llm: LLM) -> Iterator[None]:
        """Record what the engine of `llm`, which is in this process, does while the block runs."""
        core = llm.engine.client.core  # type: ignore[attr-defined]
        executor = core.executor
        wrapped = [
            self._wrap(core.scheduler, "schedule", CORE, "plan"),
            self._wrap(core.scheduler, "update_from_output", CORE, "update"),
            self._wrap(llm.engine, "process_outputs", CORE, "outputs"),
            self._wrap(executor, "execute_model", STEPS, "launch"),
            self._wrap(executor, "sample_tokens", STEPS, "sample"),
            self._replace(executor, "submit", lambda submit: lambda plan: TimedHandle(submit(plan), self)),
        ]
        worker = getattr(executor, "_worker", None)  # an executor of another kind may have none in this process
        if worker is not None:
            preparing = ("_apply_changes", "_batch", "_prepare")
            wrapped += [self._wrap(worker.runner, method, STEPS, "prepare") for method in preparing]
            wrapped += self._wrap_kernels()
        try:
            yield
        finally:
            for undo in reversed(wrapped):
                undo()

    def _wrap_kernels(self) -> list[Callable[[], None]]:
        """Wraps the kernels of a CPU: each call of one, and the calls of a recorded pass, become spans."""
        from ratoon.layers.native import library
        from ratoon.layers.native.recording import Program

        kernels = library()
        if kernels is None:
            return []
        timed = {name: self._timed(call, KERNELS, name) for name, call in kernels.functions.items()}
        for name in NOT_OF_A_PASS:
            timed.pop(name, None)
        kernels.replace(timed)
        run = Program.run
        Program.run = self._run_timed  # type: ignore[method-assign, assignment]

        def undo() -> None:
            kernels.replace(kernels.functions)
            Program.run = run  # type: ignore[method-assign]

        return [undo]

    @property
    def _run_timed(self) -> Callable[[Any], None]:
        def run(program: Any) -> None:
            begin = last = self.now()
            for name, nanoseconds in zip(program.names, program.run_timed(), strict=True):
                end = begin + nanoseconds / 1e3
                self.spans.append(Span(KERNELS, name, last, end))
                last = end

        return run

    def add(self, lane: str, name: str, begin: float) -> None:
        self.spans.append(Span(lane, name, begin, self.now()))

    def _wrap(self, owner: Any, method: str, lane: str, name: str) -> Callable[[], None]:
        return self._replace(owner, method, lambda call: self._timed(call, lane, name))

    def _timed(self, call: Callable[..., Any], lane: str, name: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = self.now()
            try:
                return call(*arguments, **options)
            finally:
                self.add(lane, name, begin)

        return timed

    @staticmethod
    def _replace(
        owner: Any, method: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> Callable[[], None]:
        """Put a wrapper in the place of a method. An executor of another kind may lack it, and has no such spans."""
        original = getattr(owner, method, None)
        if original is None:
            return lambda: None
        setattr(owner, method, make(original))
        return lambda: delattr(owner, method)


class TimedHandle:
    """A step in flight whose result is waited for in a span."""

    def __init__(self, handle: Any, recorder: SpanRecorder) -> None:
        self._handle = handle
        self._recorder = recorder

    def launch(self) -> None:
        self._handle.launch()

    def result(self) -> Any:
        begin = self._recorder.now()
        try:
            return self._handle.result()
        finally:
            self._recorder.add(CORE, WAIT, begin)


def busy_time(spans: Sequence[Span], lane: str, begin: float, end: float) -> float:
    """Microseconds of a window in which the lane did something other than wait. Spans that overlap count once."""
    inside = sorted(
        (max(span.begin, begin), min(span.end, end))
        for span in spans
        if span.lane == lane and span.name != WAIT and span.end > begin and span.begin < end
    )
    busy, last = 0.0, begin
    for first, stop in inside:
        if stop > last:
            busy += stop - max(first, last)
            last = stop
    return busy


# ---- kinds of work ----

PRODUCTS, ATTENTION, ROWS, SAMPLING = "products", "attention", "norms, rope, activation", "sampling"
PREPARATION, BETWEEN, PLANNING = "input preparation", "between kernels", "planning"
OUTPUTS, REST = "detokenising, outputs", "the rest"
PARTS = (PRODUCTS, ATTENTION, ROWS, BETWEEN, SAMPLING, PREPARATION, PLANNING, OUTPUTS, REST)

KINDS = {
    "ratoon_linear": PRODUCTS,
    "ratoon_gated_mlp": PRODUCTS,  # with the activation in it
    "ratoon_quantised_linear": PRODUCTS,
    "ratoon_quantised_gated_mlp": PRODUCTS,
    "ratoon_attention": ATTENTION,
    "ratoon_store_kv": ATTENTION,
    "ratoon_allow_bits": SAMPLING,
    "ratoon_draw": SAMPLING,
    "ratoon_greedy": SAMPLING,
}


def kind_of(kernel: str) -> str:
    return KINDS.get(kernel, ROWS)


def parts_of_steps(spans: Sequence[Span], begin: float, end: float) -> dict[str, float]:
    """Microseconds of the window by kind of work, in the order of PARTS. Work on two threads at a time counts twice."""
    inside = [span for span in spans if span.begin >= begin and span.end <= end]
    kernels = [span for span in inside if span.lane == KERNELS]
    times = dict.fromkeys(PARTS, 0.0)
    for kernel in kernels:
        times[kind_of(kernel.name)] += kernel.end - kernel.begin
    launches, samples, prepared = (
        [span for span in inside if span.lane == STEPS and span.name == name]
        for name in ("launch", "sample", "prepare")
    )
    times[PREPARATION] = _length(prepared)
    times[BETWEEN] = _length(launches) - times[PREPARATION] - _length(_within(kernels, launches))
    times[SAMPLING] += _length(samples) - _length(_within(kernels, samples))
    for span in inside:
        if span.lane == CORE and span.name != WAIT:
            times[OUTPUTS if span.name == "outputs" else PLANNING] += span.end - span.begin
    times[REST] = max(0.0, end - begin - sum(times.values()))
    return times


def _within(inner: Sequence[Span], outer: Sequence[Span]) -> list[Span]:
    """The inner spans that lie in one of the outer ones, which do not overlap."""
    found, outer = [], sorted(outer, key=lambda span: span.begin)
    place = 0
    for span in sorted(inner, key=lambda span: span.begin):
        while place < len(outer) and outer[place].end < span.end:
            place += 1
        if place < len(outer) and outer[place].begin <= span.begin:
            found.append(span)
    return found


def _length(spans: Sequence[Span]) -> float:
    return sum(span.end - span.begin for span in spans)
