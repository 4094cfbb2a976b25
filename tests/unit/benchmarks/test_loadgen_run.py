"""The runner on a client that plays a script: order, limits, what is written down, what an interrupt leaves."""

from __future__ import annotations

import asyncio
import time

import pytest

from ratoon.api.remote.client import CHAT, COMPLETIONS, RemoteError, decode_chunk
from ratoon.benchmarks.loadgen.datasets import TextPrompts, Turn
from ratoon.benchmarks.loadgen.measures import RequestRecord
from ratoon.benchmarks.loadgen.run import LoadRunner, note
from ratoon.benchmarks.loadgen.target import Target
from tests.waiting import until


class FakeClient:
    def __init__(self) -> None:
        self.bodies = []
        self.running = self.most_running = self.waiting = 0
        self.fails = False
        self.waits_forever = False

    async def stream_timed(self, path, body, receive, decode=decode_chunk) -> float:
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0.001)
            receive(time.perf_counter(), [decode_chunk(b'{"choices": [{"delta": {"content": "ok"}}]}')])
            if self.fails:
                raise RemoteError("server", "broke", kind="broke off")
            if self.waits_forever:
                self.waiting += 1
                await asyncio.Event().wait()
        finally:
            self.running -= 1
        return time.perf_counter()


def target(path: str = COMPLETIONS) -> Target:
    return Target(path, "m", TextPrompts(1.0), {"stream": True}, [])


def single(count: int) -> list[list[Turn]]:
    return [[Turn(output_len=4, prompt=f"p{index}")] for index in range(count)]


def run(client: FakeClient, sessions, path=COMPLETIONS, arrivals=None, **options):
    ended = []
    runner = LoadRunner(client, target(path), **options)
    result = asyncio.run(runner.run(sessions, arrivals or [0.0] * len(sessions), ended.append))
    assert [id(one) for one in ended] == [id(one) for one in sorted(result.records, key=lambda one: one.ended)]
    return result


def test_without_a_limit_all_run_at_once_and_with_one_no_more_than_that():
    client = FakeClient()
    assert len(run(client, single(20)).records) == 20
    assert client.most_running == 20
    client = FakeClient()
    assert len(run(client, single(20), concurrency=3).records) == 20
    assert client.most_running == 3


def test_requests_are_sent_when_they_arrive():
    result = run(FakeClient(), single(3), arrivals=[0.01, 0.03, 0.06])
    for record, moment in zip(result.records, [0.01, 0.03, 0.06]):
        assert record.scheduled == moment
        assert record.started >= moment


def test_a_turn_is_sent_with_all_that_was_said_before():
    client = FakeClient()
    turns = [Turn(output_len=4, prompt=text) for text in ("a", "b", "c")]
    result = run(client, [turns], CHAT, think_time=0.02)
    assert [(one.session, one.turn) for one in result.records] == [(0, 0), (0, 1), (0, 2)]
    contents = [[message["content"] for message in body["messages"]] for body in client.bodies]
    assert contents == [["a"], ["a", "ok", "b"], ["a", "ok", "b", "ok", "c"]]
    assert [message["role"] for message in client.bodies[2]["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert result.records[1].started - result.records[0].ended >= 0.019


def test_an_error_is_written_down_and_ends_its_conversation_alone():
    client = FakeClient()
    client.fails = True
    result = run(client, [[Turn(output_len=1, prompt="a")] * 3, [Turn(output_len=1, prompt="b")]], CHAT)
    assert [one.error_kind for one in result.records] == ["broke off"] * 2


def test_an_interrupt_leaves_what_there_is_and_stops_the_rest():
    client = FakeClient()
    client.waits_forever = True

    async def interrupted():
        runner = LoadRunner(client, target())
        task = asyncio.create_task(runner.run(single(5), [0.0] * 4 + [60.0], lambda record: None))
        await until("all have begun", lambda: client.waiting == 4)
        task.cancel()
        return await task

    result = asyncio.run(interrupted())
    assert result.interrupted and client.running == 0
    assert [one.ended for one in result.records] == [None] * 4
    assert all(len(one.chunk_times) == 1 for one in result.records)


def noted(*chunks: bytes, text=None) -> RequestRecord:
    record = RequestRecord(session=0, turn=0, scheduled=0.0)
    for index, chunk in enumerate(chunks):
        note(record, float(index), [decode_chunk(chunk)], text)
    return record


def test_chunks_without_counts_have_a_token_each_until_the_server_says_how_many():
    record = noted(
        b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        b'{"choices": [{"delta": {"content": "a"}}]}',
        b'{"choices": [{"delta": {"reasoning_content": "b"}}]}',
        b'{"choices": [{"delta": {}, "finish_reason": "stop"}]}',
        b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": null}}',
    )
    assert record.chunk_times == [1.0, 2.0]
    assert (record.num_output_tokens, record.num_prompt_tokens, record.num_cached_tokens) == (5, 9, None)
    assert record.finish_reason == "stop"


def test_with_counts_a_chunk_has_the_tokens_that_it_added_with_or_without_text():
    text: list[str] = []
    record = noted(
        b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}',
        b'{"choices": [{"text": ""}], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}',
        b'{"choices": [{"text": "b", "finish_reason": "length"}], "usage": {"prompt_tokens": 3, "completion_tokens": 4,'
        b' "prompt_tokens_details": {"cached_tokens": 2}}}',
        text=text,
    )
    assert record.chunk_tokens == [1, 2, 1]
    assert record.num_cached_tokens == 2
    assert "".join(text) == "ab"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_request_has_the_length_and_the_options_of_all(path):
    body = target(path).body(Turn(output_len=5, prompt="hi"), [])
    assert body["max_tokens"] == 5 and body["stream"] and body["model"] == "m"
    assert body.get("prompt", body.get("messages")) == (
        "hi" if path == COMPLETIONS else [{"role": "user", "content": "hi"}]
    )
