"""A trace in Chrome's format, which ui.perfetto.dev opens: kernels by torch's profiler, and spans of the host."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ratoon.benchmarks.timeline.spans import CORE, DEVICE, KERNELS, STEPS, Span, SpanRecorder

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
MARKER = "ratoon: clock"  # an event at a moment that both clocks know
HOST_PROCESS = 2**22 + 1  # no process has this number, so that the profiler's own lanes stay apart
THREAD_NUMBERS = {CORE: 1, STEPS: 2, KERNELS: 3}


class DeviceTrace:
    """What a GPU executes, by torch's profiler. Its clock is its own: a marker tells the offset."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._marked_at = 0.0
        self.events: list[dict[str, Any]] = []  # as in the file, whole

    def start(self) -> None:
        from torch.profiler import record_function

        self._profile.start()
        for _ in range(3):  # the first takes a while to begin
            self._marked_at = SpanRecorder.now()
            with record_function(MARKER):
                pass

    def stop(self) -> list[Span]:
        """The device's spans, by the host's clock."""
        import torch

        torch.cuda.synchronize()
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            content = json.loads(path.read_text(encoding="utf-8"))
        self.events = shift_events(content["traceEvents"], self._marked_at)
        return device_spans(self.events)


def shift_events(events: list[dict[str, Any]], marked_at: float) -> list[dict[str, Any]]:
    """Returns the events by the host's clock, by which the last marker began at `marked_at`."""
    marks = [event["ts"] for event in events if event.get("name") == MARKER and "ts" in event]
    offset = marked_at - max(marks) if marks else 0.0
    return [{**event, "ts": event["ts"] + offset} if "ts" in event else event for event in events]


def device_spans(events: Sequence[dict[str, Any]]) -> list[Span]:
    return [
        Span(DEVICE, event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in DEVICE_CATEGORIES
    ]


def write_trace(path: Path, host_spans: Sequence[Span], device_events: Sequence[dict[str, Any]]) -> None:
    """Host spans as a process of their own beside what the profiler recorded."""
    pid = HOST_PROCESS
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": "ratoon, host"}}]
    lanes = {span.lane for span in host_spans}
    for lane, number in THREAD_NUMBERS.items():
        if lane == KERNELS and lane not in lanes:
            continue
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": {"name": lane}})
    events += [
        {
            "ph": "X",
            "cat": "ratoon",
            "name": span.name.removeprefix("ratoon_"),
            "pid": pid,
            "tid": THREAD_NUMBERS[span.lane],
            "ts": span.begin,
            "dur": span.end - span.begin,
        }
        for span in host_spans
    ]
    others = [event for event in device_events if event.get("name") != MARKER]
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events + others}), encoding="utf-8")
