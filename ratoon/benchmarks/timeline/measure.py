"""Decode steps of a batch of requests, or a prompt: timed alone, then again while everything is recorded.

Recording slows a step down, so the device's share is what it worked in a recorded step, divided by the time of a step
that was not recorded.
"""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ratoon.benchmarks.timeline.spans import CORE, DEVICE, KERNELS, STEPS, Span, SpanRecorder, busy_time, parts_of_steps
from ratoon.benchmarks.timeline.trace import DeviceTrace
from ratoon.core.errors import EngineError
from ratoon.core.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from ratoon.api.llm import LLM

WARM_UP_STEPS = 8  # all requests decode, and graphs of this batch are captured
SPARE_TOKENS = 8  # no answer may end before the last step that is recorded


@dataclass(frozen=True, slots=True)
class Timeline:
    """Some decode steps of one batch, or the computation of one prompt, which counts as one step."""

    batch: int
    num_steps: int
    step_seconds: float  # without recording
    recorded_seconds: float  # of a step while it was recorded
    spans: list[Span]  # of all lanes, by one clock
    device_events: list[dict[str, Any]]  # of torch's profiler; none on a CPU
    begin: float  # of the recorded steps, in the clock of the spans
    end: float
    prompt_len: int = 0  # 0: decode steps

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"prefill-{self.prompt_len}" if self.prompt_len else f"batch-{self.batch}"

    @property
    def title(self) -> str:
        if self.prompt_len:
            return f"a prompt of {self.prompt_len:,}"
        return "1 request" if self.batch == 1 else f"{self.batch} requests"

    @property
    def parts(self) -> dict[str, float]:
        """The milliseconds of a step on a CPU by kind of work. It is empty where kernels are not recorded."""
        if not any(span.lane == KERNELS for span in self.spans):
            return {}
        parts = parts_of_steps(self.spans, self.begin, self.end)
        return {part: microseconds / self.num_steps / 1e3 for part, microseconds in parts.items()}

    @property
    def has_device(self) -> bool:
        return any(span.lane == DEVICE for span in self.spans)

    def share(self, lane: str) -> float:
        """The part of a step's time in which the lane worked."""
        busy = busy_time(self.spans, lane, self.begin, self.end) / self.num_steps / 1e6
        return min(1.0, busy / self.step_seconds)

    def as_dict(self) -> dict[str, Any]:
        shares = {name: self.share(lane) for name, lane in (("steps_thread", STEPS), ("core_thread", CORE))}
        return {
            "batch": self.batch,
            "prompt_len": self.prompt_len or None,
            "steps": self.num_steps,
            "step_ms": 1e3 * self.step_seconds,
            "recorded_step_ms": 1e3 * self.recorded_seconds,
            "device_busy": self.share(DEVICE) if self.has_device else None,
            **{f"{name}_busy": share for name, share in shares.items()},
            "parts_ms": self.parts or None,
        }


class BatchRun:
    """Requests that are sent together, and driven step by step."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._ids = itertools.count()
        self._source = random.Random(0)

    def measure(self, batch: int, input_len: int, num_steps: int) -> Timeline:
        """The batch is aborted at the end."""
        request_ids = self._send(batch, input_len, self.num_tokens(batch, input_len, num_steps))
        try:
            self._reach_decoding(set(request_ids))
            self._run(WARM_UP_STEPS)
            step_seconds = self._run(num_steps)
            recorder = SpanRecorder()
            trace = DeviceTrace() if self._on_gpu else None
            with recorder.recording(self._llm):
                if trace is not None:
                    trace.start()
                begin = recorder.now()
                recorded_seconds = self._run(num_steps)
                end = recorder.now()
                device = [] if trace is None else trace.stop()
        finally:
            self._end(request_ids)
        events = [] if trace is None else trace.events
        return Timeline(batch, num_steps, step_seconds, recorded_seconds, recorder.spans + device, events, begin, end)

    def measure_prompt(self, length: int) -> Timeline:
        """One prompt, from its request to its first token."""
        self._compute_prompt(length)  # memory of this size is there afterwards
        begin = time.perf_counter()
        self._compute_prompt(length)
        step_seconds = time.perf_counter() - begin
        recorder = SpanRecorder()
        trace = DeviceTrace() if self._on_gpu else None
        with recorder.recording(self._llm):
            if trace is not None:
                trace.start()
            first = recorder.now()
            self._compute_prompt(length)
            last = recorder.now()
            device = [] if trace is None else trace.stop()
        events, spans = [] if trace is None else trace.events, recorder.spans + device
        return Timeline(1, 1, step_seconds, (last - first) / 1e6, spans, events, first, last, length)

    def _compute_prompt(self, length: int) -> None:
        request_ids = self._send(1, length, 1)
        self._reach_decoding(set(request_ids))

    def num_tokens(self, batch: int, input_len: int, num_steps: int) -> int:
        """The number of tokens of an answer: the first requests decode while the prompts of the last are computed."""
        prefill_steps = -(-batch * input_len // self._llm.describe()["max_num_batched_tokens"])
        return prefill_steps + WARM_UP_STEPS + 2 * num_steps + SPARE_TOKENS

    @property
    def _on_gpu(self) -> bool:
        return str(self._llm.describe()["device"]).startswith("cuda")

    def _send(self, batch: int, input_len: int, num_tokens: int) -> list[str]:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=not (self._on_gpu or self._llm.front_end_config.skip_tokenizer),
            output_kind=RequestOutputKind.DELTA,
        )
        vocab_size = self._llm.source.config.vocab_size
        request_ids = [f"profile-{next(self._ids)}" for _ in range(batch)]
        for request_id in request_ids:
            prompt = [self._source.randrange(vocab_size) for _ in range(input_len)]
            self._llm.engine.add_request(request_id, prompt, params)
        return request_ids

    def _reach_decoding(self, waiting: set[str]) -> None:
        """Runs steps until each request has its first token."""
        while waiting:
            for output in self._llm.engine.step():
                if output.error is not None:
                    raise EngineError(output.error)
                waiting.discard(output.request_id)

    def _run(self, num_steps: int) -> float:
        """Seconds for a step."""
        begin = time.perf_counter()
        for _ in range(num_steps):
            self._llm.engine.step()
        return (time.perf_counter() - begin) / num_steps

    def _end(self, request_ids: list[str]) -> None:
        self._llm.abort(request_ids)
        while self._llm.engine.client.has_work():
            self._llm.engine.step()
