"""AsyncLLM.generate_continuation: a prompt in the place of a forgotten parent, and where a continuation runs."""

from __future__ import annotations

import logging

import pytest

from ratoon.core.errors import RequestError, UnknownParentError
from ratoon.core.health import EngineHealth, EngineState, Health
from ratoon.core.outputs import Continuation
from ratoon.core.params import RequestOutputKind, SamplingParams
from ratoon.engine.async_llm import AsyncLLM
from ratoon.observe.metrics import EngineMetrics
from tests.unit.engine.fakes_async import FakeAsyncClient, fake_source, on_event_loop

FINAL = SamplingParams(max_tokens=20, output_kind=RequestOutputKind.FINAL_ONLY)


@pytest.fixture(autouse=True)
def source(monkeypatch):
    monkeypatch.setattr("ratoon.models.source.resolve_model", lambda name, *_: fake_source())


def make(client: FakeAsyncClient, **options) -> AsyncLLM:
    return AsyncLLM("fake", client=client, **options)


async def final(outputs):
    return [output async for output in outputs][-1]


@on_event_loop
async def test_a_prompt_beside_a_known_parent_is_ignored():
    client = FakeAsyncClient()
    async with make(client) as llm:
        await final(llm.generate("abc", FINAL, "parent"))
        for prompt in ("", "another", [1, 999_999]):  # it is not even read
            output = await final(llm.generate_continuation("parent", "!", FINAL, prompt=prompt))
            assert output.prompt_token_ids == [*b"abccba", 256, *b"!"]


@on_event_loop
async def test_a_prompt_stands_in_for_a_forgotten_parent_and_the_output_says_so(caplog):
    client, metrics = FakeAsyncClient(), EngineMetrics("fake")
    async with make(client, metrics=metrics) as llm:
        with caplog.at_level(logging.DEBUG, logger="ratoon.engine"):
            output = await final(
                llm.generate_continuation(
                    "gone", "!", FINAL, "child", prompt="abc", cache_salt="s", owner="me", retain_kv=5
                )
            )
        assert (output.request_id, output.outputs[0].text, output.prompt) == ("child", "cba", "abc")
        assert output.continuation == Continuation("gone", 0, 3, "recomputed", fallback=True)
        (sent,) = client.core.added
        assert (sent.continuation_of, sent.cache_salt, sent.owner, sent.retain_kv) == (None, "s", "me", 5)
        assert "gone" in caplog.text
        assert metrics.continuations["recomputed"] == 1
        further = await final(llm.generate_continuation("child", "", FINAL, owner="me"))
        assert further.prompt_token_ids == [*b"abccba", 256]


@on_event_loop
async def test_without_a_prompt_a_forgotten_parent_is_an_error():
    async with make(FakeAsyncClient()) as llm:
        with pytest.raises(UnknownParentError):
            await final(llm.generate_continuation("gone", "!", FINAL))


@on_event_loop
async def test_an_ordinary_request_has_no_continuation():
    async with make(FakeAsyncClient()) as llm:
        assert (await final(llm.generate("abc", FINAL))).continuation is None


@on_event_loop
async def test_a_continuation_runs_on_the_engine_that_is_named():
    client = FakeAsyncClient()
    client.health = lambda: Health([EngineHealth(0, EngineState.OK), EngineHealth(1, EngineState.OK)])
    async with make(client, num_replicas=2) as llm:
        await final(llm.generate("abc", FINAL, "parent"))
        await final(llm.generate_continuation("parent", "!", FINAL, data_parallel_rank=1))
        await final(llm.generate_continuation("gone", "!", FINAL, data_parallel_rank=1, prompt="x"))
        assert [request.data_parallel_rank for request in client.core.added] == [None, 1, 1]
        for rank in (2, -1, True, 0.0, "0"):
            with pytest.raises(RequestError) as refused:
                await final(llm.generate_continuation("parent", "!", FINAL, data_parallel_rank=rank))
            assert refused.value.field == "data_parallel_rank" and "from 0 to 1" in str(refused.value)
