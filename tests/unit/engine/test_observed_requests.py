"""What tracer and throughput log learn of the requests of an AsyncLLM and an LLM engine."""

from __future__ import annotations

import asyncio
import logging

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ratoon.core.errors import RequestError
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
from ratoon.core.stats import SchedulerStats
from ratoon.engine.async_llm import AsyncLLM
from ratoon.engine.input.input_processor import InputProcessor
from ratoon.engine.llm_engine import LLMEngine
from ratoon.engine.output.output_processor import OutputProcessor
from ratoon.observe.throughput import INTERVAL, ThroughputLog
from ratoon.observe.tracing import make_tracer
from tests.unit.engine.fakes import FakeClient, byte_tokenizer, model_config
from tests.unit.engine.fakes_async import FakeAsyncClient, FakeSource, fake_source, on_event_loop

ENDPOINT = "http://127.0.0.1:1"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01", "cookie": "secret"}


@pytest.fixture(autouse=True)
def source(monkeypatch) -> FakeSource:
    found = fake_source()
    monkeypatch.setattr("ratoon.models.source.resolve_model", lambda *_: found)
    return found


@pytest.fixture
def spans(monkeypatch) -> InMemorySpanExporter:
    """What engines that are built in the test send to their collector."""
    exporter = InMemorySpanExporter()
    make = make_tracer
    monkeypatch.setattr("ratoon.engine.base_llm.make_tracer", lambda url, model: make(url, model, exporter))
    return exporter


async def generate(llm: AsyncLLM, prompt: str = "abc", **options) -> None:
    async for _ in llm.generate(prompt, SamplingParams(max_tokens=20), **options):
        pass


@on_event_loop
async def test_requests_of_a_traced_engine_leave_spans_under_the_callers(spans):
    client = FakeAsyncClient()
    async with AsyncLLM("fake", client=client, otlp_traces_endpoint=ENDPOINT) as llm:
        await generate(llm, request_id="mine", trace_headers=HEADERS)
        await generate(llm)
    first, second = client.core.added
    assert first.trace_headers == {"traceparent": HEADERS["traceparent"]} and second.trace_headers == {}
    roots = {span.attributes["gen_ai.request.id"]: span for span in spans.get_finished_spans()}
    mine = roots["mine"]
    assert f"{mine.context.trace_id:032x}" == TRACE_ID
    assert mine.attributes["gen_ai.usage.prompt_tokens"] == 3
    assert mine.attributes["gen_ai.usage.completion_tokens"] == 4
    assert mine.attributes["gen_ai.request.max_tokens"] == 20
    assert mine.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert mine.attributes["gen_ai.latency.time_to_first_token"] >= 0
    assert len(roots) == 2


@on_event_loop
async def test_what_the_engine_tells_becomes_spans(spans):
    client = FakeAsyncClient(by_hand=True)
    async with AsyncLLM("fake", client=client, otlp_traces_endpoint=ENDPOINT) as llm:
        task = asyncio.create_task(generate(llm))
        while not client.core.added:
            await asyncio.sleep(0)
        (request,) = client.core.added
        now = request.arrival_time
        kinds = (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED, EngineCoreEventType.PREFILL_CHUNK)
        events = [EngineCoreEvent(kind, now) for kind in kinds]
        client.send(EngineCoreOutput(request.request_id, [97], events=events))
        client.send(EngineCoreOutput(request.request_id, [98], finish_reason=FinishReason.STOP))
        await task
    names = sorted(span.name for span in spans.get_finished_spans())
    assert names == ["decode", "llm_request", "prefill", "prefill_chunk", "queue"]


@on_event_loop
async def test_an_engine_that_is_not_traced_pays_nothing_and_still_checks_headers():
    client = FakeAsyncClient()
    async with AsyncLLM("fake", client=client) as llm:
        await generate(llm, trace_headers=HEADERS)
        with pytest.raises(RequestError, match="trace_headers"):
            await generate(llm, trace_headers="traceparent")
    assert [request.trace_headers for request in client.core.added] == [None]


@on_event_loop
async def test_an_aborted_request_has_its_span(spans):
    client = FakeAsyncClient(by_hand=True)
    async with AsyncLLM("fake", client=client, otlp_traces_endpoint=ENDPOINT) as llm:
        task = asyncio.create_task(generate(llm))
        while not client.core.added:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    (span,) = spans.get_finished_spans()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)


@pytest.mark.parametrize("disabled", [False, True])
def test_the_throughput_of_an_async_engine_is_in_the_log(monkeypatch, caplog, disabled):
    monkeypatch.setattr("ratoon.engine.async_llm_engine.INTERVAL", 0.05)
    caplog.set_level(logging.INFO, "ratoon.observe.throughput")

    @on_event_loop
    async def run() -> None:
        client = FakeAsyncClient()
        async with AsyncLLM("fake", client=client, disable_log_stats=disabled) as llm:
            await generate(llm)
            client.send(stats=SchedulerStats(num_running=2))
            while not disabled and "Running: 2 reqs" not in caplog.text:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)

    run()
    assert ("Engine 000: Avg prompt throughput: " in caplog.text) is not disabled


def test_the_throughput_of_an_engine_without_a_loop_is_in_the_log(caplog):
    caplog.set_level(logging.INFO, "ratoon.observe.throughput")
    now = 0.0
    log = ThroughputLog(lambda: now)
    client = FakeClient()
    tokenizer = byte_tokenizer()
    processor = OutputProcessor(tokenizer, throughput=log)
    engine = LLMEngine(client, InputProcessor(model_config(), tokenizer), processor, throughput=log)
    engine.add_request("a", "abcdefgh", SamplingParams(max_tokens=8))
    engine.step()
    while engine.has_unfinished_requests():
        now += INTERVAL / 4
        engine.step()
    assert len(caplog.records) == 1
    # Eight tokens of the prompt and five of the answer in the first ten seconds
    assert "prompt throughput: 0.8 tokens/s, Avg generation throughput: 0.5 tokens/s" in caplog.text


def test_the_throughput_log_counts_the_tokens_of_texts_that_are_read_as_a_prompt():
    log = ThroughputLog(lambda: 0.0)
    counted: list[tuple[int, int]] = []
    log.record_tokens = lambda engine, num_prompt, num_new: counted.append((num_prompt, num_new))
    client, tokenizer = FakeClient(), byte_tokenizer()
    inputs = InputProcessor(model_config(), tokenizer)
    processor = OutputProcessor(tokenizer, selector=inputs.selector, throughput=log)
    engine = LLMEngine(client, inputs, processor, throughput=log)
    engine.add_request("a", "abc", SamplingParams(max_tokens=2, return_hidden_states=True))
    while engine.has_unfinished_requests():
        engine.step()
    assert counted == [(3, 1), (0, 1), (5, 0)]
