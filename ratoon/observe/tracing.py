"""Spans of requests for OpenTelemetry, made when a request has ended from the times that are known by then.

Nothing is measured here, and nothing runs while a request does: without a tracer it costs nothing. Spans are sent over
OTLP/HTTP by a thread of OpenTelemetry's own, in batches; what can't be sent is dropped, without effect on requests.
The packages (extra `otel`) are imported when a tracer is made.

    llm_request            from arrival to the end; its parent is the caller's span (W3C traceparent)
      queue                until it came into the running batch
      prefill              until its first token was sampled
        prefill_chunk      each part of its prompt
      decode               until its last token was sampled
        prefill_chunk      what had to be computed again
      preempted            each time that it waited without its memory
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ratoon.core.errors import ConfigError, RequestError
from ratoon.core.outputs import RequestMetrics
from ratoon.core.request import EngineCoreEvent, EngineCoreEventType
from ratoon.observe.logging import get_logger
from ratoon.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

TRACE_HEADERS = ("traceparent", "tracestate")  # of the W3C's trace context
MAX_HEADER_LENGTH = 8192
TRACES_PATH = "/v1/traces"
SETTING = "otlp_traces_endpoint"
SECONDS_TO_FLUSH = 3.0  # at the end, for what was not sent yet
MAX_QUEUE_SIZE = 16384  # spans that wait to be sent; more are dropped

logger = get_logger(__name__)


@dataclass(slots=True)
class RequestTrace:
    """What spans are made from."""

    request_id: str
    headers: Mapping[str, str]  # of TRACE_HEADERS
    metrics: RequestMetrics
    events: list[EngineCoreEvent]
    num_prompt_tokens: int
    finish_reasons: list[str]  # of each choice
    num_cached_tokens: int | None = None
    error: str | None = None
    params: dict[str, Any] = field(default_factory=dict)  # attributes of the request


def trace_context(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The part of a caller's headers that names the caller's span; anything else is left out."""
    if headers is None:
        return {}
    if not isinstance(headers, Mapping) or not all(
        isinstance(name, str) and isinstance(value, str) for name, value in headers.items()
    ):
        raise RequestError("trace_headers", "are not headers", 'a mapping of text to text, such as {"traceparent": …}')
    return {
        name.lower(): value
        for name, value in headers.items()
        if name.lower() in TRACE_HEADERS and len(value) <= MAX_HEADER_LENGTH
    }


def make_tracer(endpoint: str, model_name: str, exporter: SpanExporter | None = None) -> RequestTracer:
    """A tracer that sends to a collector's URL, or to an exporter of the caller's. ConfigError: the URL is invalid, or
    packages are missing."""
    url = traces_url(endpoint)
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=url)
    except ImportError as error:
        raise ConfigError(SETTING, f"{error.name} is not installed", "pip install 'ratoon[otel]'") from None
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if named else {"service.name": "ratoon"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, MAX_QUEUE_SIZE, schedule_delay_millis=1000))
    return RequestTracer(provider, model_name)


def traces_url(endpoint: str) -> str:
    """The URL that spans are posted to. One without a path gets OTLP's own."""
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, AttributeError, TypeError):
        valid = False
    if not valid:
        expected = f"a URL such as http://127.0.0.1:4318{TRACES_PATH}"
        raise ConfigError(SETTING, f"{endpoint!r} is not a collector's URL", expected)
    return parts._replace(path=TRACES_PATH).geturl() if parts.path in ("", "/") else endpoint


class RequestTracer:
    """`record` never raises and never waits."""

    def __init__(self, provider: Any, model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("ratoon", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self.model_name = model_name  # as spans have it
        self._failed = False

    def record(self, trace: RequestTrace) -> None:
        """A request has ended."""
        try:
            self._record(trace)
        except Exception:
            if not self._failed:  # once: a log line for every request would not help
                self._failed = True
                logger.exception("spans of request %s, and perhaps of others, are lost", trace.request_id)

    def _record(self, trace: RequestTrace) -> None:
        from opentelemetry.trace import SpanKind

        metrics = trace.metrics
        end = metrics.finished_time if metrics.finished_time is not None else time.monotonic()
        spans = _SpanMaker(self._tracer, metrics.arrival_time, end)
        parent = self._propagator.extract(trace.headers)
        request = spans.begin("llm_request", metrics.arrival_time, parent, SpanKind.SERVER)
        if not request.is_recording():
            return  # the caller's trace is not sampled
        request.set_attributes(_attributes(trace, self.model_name))
        if trace.error is not None:
            _set_error(request, trace.error)
        _add_phases(spans, request, trace, end)
        _add_preemptions(spans, request, trace.events, end)
        spans.end(request, end)

    def shutdown(self) -> None:
        """Send what is left, for a few seconds at most: a collector that does not answer must not block."""
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        thread.join(SECONDS_TO_FLUSH)


class _SpanMaker:
    """Spans of one request: monotonic times become the wall clock's, and none begins before the request or ends after
    it."""

    def __init__(self, tracer: Any, earliest: float, latest: float, now: Callable[[], float] = time.monotonic) -> None:
        self._tracer = tracer
        self._earliest, self._latest = earliest, latest
        self._offset = time.time_ns() - int(now() * 1e9)

    def wall(self, moment: float) -> int:
        return int(min(max(moment, self._earliest), self._latest) * 1e9) + self._offset

    def begin(self, name: str, begin: float, context: Any, kind: Any = None, **attributes: Any) -> Span:
        options = {} if kind is None else {"kind": kind}
        span: Span = self._tracer.start_span(
            name, context, start_time=self.wall(begin), attributes=attributes or None, **options
        )
        return span

    def end(self, span: Span, end: float) -> None:
        span.end(self.wall(end))

    def child(self, parent: Span, name: str, begin: float, end: float, attributes: Mapping[str, Any]) -> None:
        from opentelemetry.trace import set_span_in_context

        self.end(self.begin(name, begin, set_span_in_context(parent), **attributes), end)


def _add_phases(spans: _SpanMaker, request: Span, trace: RequestTrace, end: float) -> None:
    from opentelemetry.trace import set_span_in_context

    metrics, context = trace.metrics, set_span_in_context(request)
    if metrics.scheduled_time is None:
        return  # it never ran, or the engine that knew is gone
    if metrics.queued_time is not None:
        spans.end(spans.begin("queue", metrics.queued_time, context), metrics.scheduled_time)
    first, last = metrics.sampled_first_time, metrics.sampled_last_time
    chunks = [event for event in trace.events if event.type == EngineCoreEventType.PREFILL_CHUNK]
    prefill = spans.begin("prefill", metrics.scheduled_time, context)
    for chunk in chunks:
        if first is None or chunk.timestamp < first:
            _add_chunk(spans, prefill, chunk)
    spans.end(prefill, end if first is None else first)  # a vector has no token: it ends with its prompt
    if first is None or last is None or metrics.num_generation_tokens < 2:
        return
    decode = spans.begin("decode", first, context)
    for chunk in chunks:
        if chunk.timestamp >= first:
            _add_chunk(spans, decode, chunk)
    spans.end(decode, last)


def _add_chunk(spans: _SpanMaker, parent: Span, chunk: EngineCoreEvent) -> None:
    attributes = {"ratoon.num_tokens": chunk.num_tokens, "ratoon.choice": chunk.choice}
    spans.child(parent, "prefill_chunk", chunk.timestamp, chunk.timestamp + chunk.seconds, attributes)


def _add_preemptions(spans: _SpanMaker, request: Span, events: list[EngineCoreEvent], end: float) -> None:
    """Adds a span for each preemption, which lasts until the same choice is scheduled again."""
    since: dict[int, float] = {}
    for event in events:
        if event.type == EngineCoreEventType.PREEMPTED:
            since[event.choice] = event.timestamp
            request.add_event("preempted", {"ratoon.choice": event.choice}, spans.wall(event.timestamp))
        elif event.type == EngineCoreEventType.SCHEDULED and event.choice in since:
            attributes = {"ratoon.choice": event.choice}
            spans.child(request, "preempted", since.pop(event.choice), event.timestamp, attributes)
    for choice, begin in since.items():
        spans.child(request, "preempted", begin, end, {"ratoon.choice": choice})


def _attributes(trace: RequestTrace, model_name: str) -> dict[str, Any]:
    """The attributes of a request's span, under the names that vLLM gives them."""
    metrics = trace.metrics
    values = {
        "gen_ai.request.id": trace.request_id,
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": trace.finish_reasons,
        "gen_ai.usage.prompt_tokens": trace.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": metrics.num_generation_tokens,
        "gen_ai.usage.cached_tokens": trace.num_cached_tokens,
        "gen_ai.latency.time_in_queue": metrics.queue_time,
        "gen_ai.latency.time_to_first_token": metrics.time_to_first_token,
        "gen_ai.latency.e2e": metrics.e2e_latency,
        "gen_ai.latency.time_in_model_prefill": metrics.prefill_time,
        "gen_ai.latency.time_in_model_decode": metrics.decode_time,
        "gen_ai.latency.time_in_model_inference": metrics.inference_time,
        "ratoon.num_preemptions": metrics.num_preemptions,
        **trace.params,
    }
    return {name: value for name, value in values.items() if value is not None}


def _set_error(span: Span, error: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, error))
