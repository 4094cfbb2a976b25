"""Spans of requests, as an exporter in memory gets them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from ratoon.core.errors import ConfigError, RequestError
from ratoon.core.outputs import RequestMetrics
from ratoon.core.request import EngineCoreEvent, EngineCoreEventType
from ratoon.observe.tracing import RequestTrace, RequestTracer, make_tracer, trace_context, traces_url

QUEUED, SCHEDULED, PREEMPTED, PREFILL_CHUNK = EngineCoreEventType
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter) -> RequestTracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return RequestTracer(provider, "a-model")


def trace_of(began: float, **fields) -> RequestTrace:
    """A request that arrived at `began`, waited, was computed in two parts, was preempted once, and got five tokens."""
    metrics = RequestMetrics(began, began + 4.1, began + 10, 5, began + 0.5, began + 1, began + 4, began + 9, 1)
    events = [
        EngineCoreEvent(QUEUED, began + 0.5),
        EngineCoreEvent(SCHEDULED, began + 1),
        EngineCoreEvent(PREFILL_CHUNK, began + 1, 1.0, 2048),
        EngineCoreEvent(PREFILL_CHUNK, began + 2, 2.0, 100),
        EngineCoreEvent(PREEMPTED, began + 5),
        EngineCoreEvent(SCHEDULED, began + 6),
        EngineCoreEvent(PREFILL_CHUNK, began + 6, 1.5, 2150),
    ]
    given = {"headers": {}, "metrics": metrics, "events": events, "num_prompt_tokens": 2148}
    return RequestTrace(request_id="r", finish_reasons=["stop"], **(given | fields))


def by_name(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    spans: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name, []).append(span)
    return spans


def seconds(span: ReadableSpan, root: ReadableSpan) -> tuple[float, float]:
    """Begin and end, from the root's begin on."""
    return round((span.start_time - root.start_time) / 1e9, 3), round((span.end_time - root.start_time) / 1e9, 3)


def test_a_request_has_spans_for_queue_prefill_decode_chunks_and_preemptions(tracer, exporter):
    tracer.record(trace_of(time.monotonic() - 10))
    spans = by_name(exporter)
    (root,) = spans["llm_request"]
    assert root.kind == SpanKind.SERVER and root.parent is None
    assert abs(root.end_time / 1e9 - time.time()) < 60  # monotonic times became the wall clock's
    assert seconds(root, root) == (0, 10)
    (queue,), (prefill,), (decode,) = spans["queue"], spans["prefill"], spans["decode"]
    assert [seconds(span, root) for span in (queue, prefill, decode)] == [(0.5, 1), (1, 4), (4, 9)]
    assert all(span.parent.span_id == root.context.span_id for span in (queue, prefill, decode))
    chunks = spans["prefill_chunk"]
    assert [(seconds(chunk, root), chunk.attributes["ratoon.num_tokens"]) for chunk in chunks] == [
        ((1, 2), 2048), ((2, 4), 100), ((6, 7.5), 2150),
    ]  # fmt: skip
    assert [chunk.parent.span_id for chunk in chunks] == [
        prefill.context.span_id, prefill.context.span_id, decode.context.span_id,
    ]  # fmt: skip
    (preempted,) = spans["preempted"]
    assert seconds(preempted, root) == (5, 6) and preempted.parent.span_id == root.context.span_id
    assert [event.name for event in root.events] == ["preempted"]
    assert {span.context.trace_id for span in exporter.get_finished_spans()} == {root.context.trace_id}


def test_the_attributes_have_the_names_of_the_conventions(tracer, exporter):
    params = {"gen_ai.request.max_tokens": 5, "gen_ai.request.top_p": None}
    tracer.record(trace_of(time.monotonic() - 10, num_cached_tokens=16, params=params))
    attributes = dict(by_name(exporter)["llm_request"][0].attributes)
    latencies = {name: attributes.pop(name) for name in list(attributes) if name.startswith("gen_ai.latency.")}
    assert latencies == {
        "gen_ai.latency.time_in_queue": pytest.approx(0.5),
        "gen_ai.latency.time_to_first_token": pytest.approx(4.1),
        "gen_ai.latency.e2e": pytest.approx(10),
        "gen_ai.latency.time_in_model_prefill": pytest.approx(3),
        "gen_ai.latency.time_in_model_decode": pytest.approx(5),
        "gen_ai.latency.time_in_model_inference": pytest.approx(8),
    }
    assert attributes == {
        "gen_ai.request.id": "r",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.response.model": "a-model",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.prompt_tokens": 2148,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.cached_tokens": 16,
        "ratoon.num_preemptions": 1,
    }


def test_the_callers_span_is_the_parent(tracer, exporter):
    tracer.record(trace_of(time.monotonic() - 10, headers=HEADERS))
    (root,) = by_name(exporter)["llm_request"]
    assert f"{root.context.trace_id:032x}" == TRACE_ID and f"{root.parent.span_id:016x}" == SPAN_ID
    assert root.context.trace_state.get("vendor") == "1"


def test_a_trace_that_the_caller_does_not_sample_is_left_out(tracer, exporter):
    tracer.record(trace_of(time.monotonic() - 10, headers={"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"}))
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("garbage", ["", "00-zz-1-01", "x" * 5000, "\x00"])
def test_a_trace_context_that_is_garbage_begins_a_trace_of_its_own(tracer, exporter, garbage):
    tracer.record(trace_of(time.monotonic() - 10, headers={"traceparent": garbage, "tracestate": garbage}))
    assert by_name(exporter)["llm_request"][0].parent is None


def test_a_request_that_never_ran_has_one_span(tracer, exporter):
    now = time.monotonic()
    tracer.record(trace_of(now, metrics=RequestMetrics(now - 1, finished_time=now), events=[], error="it is over"))
    (root,) = exporter.get_finished_spans()
    assert root.status.status_code == StatusCode.ERROR and root.status.description == "it is over"


def test_no_span_leaves_its_request(tracer, exporter):
    """Events of a clock that disagrees."""
    began = time.monotonic() - 10
    events = [EngineCoreEvent(PREFILL_CHUNK, began - 500, 1.0, 7), EngineCoreEvent(PREEMPTED, began + 500)]
    tracer.record(trace_of(began, events=events))
    (root,) = by_name(exporter)["llm_request"]
    for span in exporter.get_finished_spans():
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time


def test_a_span_that_fails_hurts_nobody(caplog):
    class Broken(SpanExporter):
        def export(self, spans):
            raise RuntimeError("no")

    tracer = make_tracer("http://127.0.0.1:1", "m", Broken())
    for _ in range(3):
        tracer.record(trace_of(time.monotonic() - 10))
        tracer.record(trace_of(time.monotonic(), metrics=None))  # type: ignore[arg-type]
    tracer.shutdown()
    assert sum(record.name == "ratoon.observe.tracing" for record in caplog.records) == 1


def test_a_collector_that_does_not_answer_keeps_nobody_at_the_end(monkeypatch):
    begun, answers, ended = threading.Event(), threading.Event(), threading.Event()

    class Slow(SpanExporter):
        def export(self, spans):
            begun.set()
            answers.wait(60)
            ended.set()
            return SpanExportResult.SUCCESS

    monkeypatch.setattr("ratoon.observe.tracing.SECONDS_TO_FLUSH", 0.1)
    tracer = make_tracer("http://127.0.0.1:1", "m", Slow())
    tracer.record(trace_of(time.monotonic() - 10))
    tracer.shutdown()
    assert begun.is_set() and not ended.is_set(), "the end waited for the collector"
    answers.set()


def test_of_headers_only_the_trace_context_is_taken():
    assert trace_context(None) == {}
    headers = {"Traceparent": "a", "TRACESTATE": "b", "Authorization": "secret"}
    assert trace_context(headers) == {"traceparent": "a", "tracestate": "b"}
    assert trace_context({"traceparent": "x" * 100_000}) == {}
    for wrong in ("traceparent", {"traceparent": 1}, {1: "a"}, ["traceparent"]):
        with pytest.raises(RequestError) as caught:
            trace_context(wrong)  # type: ignore[arg-type]
        assert caught.value.field == "trace_headers"


def test_a_url_without_a_path_gets_that_of_otlp():
    assert traces_url("http://host:4318") == traces_url("http://host:4318/") == "http://host:4318/v1/traces"
    assert traces_url("https://host/other") == "https://host/other"
    for wrong in ("host:4318", "grpc://host:4317", "http://", "", "http://host:99999999", 4318):
        with pytest.raises(ConfigError) as caught:
            traces_url(wrong)  # type: ignore[arg-type]
        assert caught.value.field == "otlp_traces_endpoint"


def test_missing_packages_are_named_at_the_start():
    script = """
import sys
sys.modules["opentelemetry.exporter.otlp.proto.http.trace_exporter"] = None
from ratoon.core.errors import ConfigError
from ratoon.engine.async_llm import AsyncLLM
try:
    AsyncLLM("m", otlp_traces_endpoint="http://127.0.0.1:4318")
except ConfigError as error:
    assert "ratoon[otel]" in str(error) and "opentelemetry" in str(error), error
else:
    raise AssertionError("it went on")
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_without_a_tracer_nothing_of_opentelemetry_is_loaded():
    script = """
import sys
import ratoon.observe.tracing, ratoon.engine.output.output_processor
assert not any(name.startswith("opentelemetry") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
