"""Spans of a real server, as a collector gets them over OTLP/HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.e2e.servers import serving
from tests.unit.api.server.harness import MODEL, write_tiny_model
from tests.waiting import wait_until

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LONG_ENOUGH = 60.0


class Collector:
    """Takes what is posted to /v1/traces, and keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, message: ExportTraceServiceRequest) -> None:
        for resource in message.resource_spans:
            self.resources.append({pair.key: pair.value.string_value for pair in resource.resource.attributes})
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def of_trace(self, trace_id: str) -> dict[str, list[Any]]:
        spans: dict[str, list[Any]] = {}
        for span in self.spans:
            if span.trace_id.hex() == trace_id:
                spans.setdefault(span.name, []).append(span)
        return spans

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def attributes(span: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


def test_a_collector_gets_the_spans_of_an_http_request(collector, tmp_path):
    model = write_tiny_model(tmp_path / MODEL)
    options = ("--max-num-batched-tokens", "16", "--otlp-traces-endpoint", collector.url)
    with serving(model, *options) as server:
        name = requests.get(f"{server.api}/models", timeout=LONG_ENOUGH).json()["data"][0]["id"]
        prompt = [5] * 40
        body = {"model": name, "prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
        answer = requests.post(f"{server.api}/completions", json=body, headers=headers, timeout=LONG_ENOUGH).json()
        assert answer["usage"]["completion_tokens"] == 5
        wait_until("the spans are there", lambda: "llm_request" in collector.of_trace(TRACE_ID))
    spans = collector.of_trace(TRACE_ID)
    (root,) = spans["llm_request"]
    assert root.parent_span_id.hex() == SPAN_ID
    assert {kind: len(found) for kind, found in spans.items()} == {
        "llm_request": 1, "queue": 1, "prefill": 1, "decode": 1, "prefill_chunk": 3,
    }  # fmt: skip
    assert [attributes(chunk)["ratoon.num_tokens"] for chunk in spans["prefill_chunk"]] == [16, 16, 8]
    for found in spans.values():
        for span in found:
            assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= root.end_time_unix_nano
    values = attributes(root)
    assert values["gen_ai.request.id"] == answer["id"] and values["gen_ai.response.model"] == name
    assert (values["gen_ai.usage.prompt_tokens"], values["gen_ai.usage.completion_tokens"]) == (40, 5)
    assert 0 < values["gen_ai.latency.time_to_first_token"] <= values["gen_ai.latency.e2e"]
    assert all(resource["service.name"] == "ratoon" for resource in collector.resources)
