"""What a step on a CPU spends its time on, by kind of work: the rows of the table of `ratoon bench profile`."""

from __future__ import annotations

from collections.abc import Sequence

from ratoon.benchmarks.timeline.spans import CORE, KERNELS, STEPS, WAIT, Span

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
