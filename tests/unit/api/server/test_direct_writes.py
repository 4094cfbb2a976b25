"""Most events of a stream are encoded from a template and written without a task. The bytes that a client gets are
the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ratoon.core.outputs import LogprobsLists
from ratoon.core.request import EngineCoreOutput
from tests.unit.api.server.harness import MODEL, Answer, Client, OpenRequest, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

TEXT = 'one "two" % three\n\\ \x1f你好 🙂 %s the end'
USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CASES: list[dict[str, Any]] = [
    {},
    USAGE,
    CONTINUOUS,
    {"n": 2, **CONTINUOUS},
    {"n": 2, "return_token_ids": True},
    {"stop": ["th"], **CONTINUOUS},
    {"echo": True, **USAGE},
]
WORDS = {"prompt": "x", "max_tokens": 100}
MESSAGES = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100}


def open_stream(client: Client, chat: bool = False, **fields: Any) -> OpenRequest:
    path, asked = ("/v1/chat/completions", MESSAGES) if chat else ("/v1/completions", WORDS)
    return client.open("POST", path, {"model": MODEL, "stream": True, **asked, **fields})


def comparable(answer: Answer) -> list[str]:
    """Events as text, so that the order of fields counts, without what differs from request to request."""
    events = answer.events()
    assert all(event["id"] == events[0]["id"] for event in events)
    return [json.dumps({**event, "id": "", "created": 0}) for event in events]


@pytest.mark.parametrize(
    ("fields", "chat"),
    [(fields, chat) for fields in CASES for chat in (False, True) if not (chat and "echo" in fields)],
)
@on_event_loop
async def test_events_are_the_same_written_directly_and_sent_by_a_task(fields, chat):
    answers = []
    async with scripted(say(TEXT, TEXT[::-1])) as client:
        for client.writes_directly in (True, False):
            opened = open_stream(client, chat, **fields)
            answers.append(await opened.answer())
            assert (opened.num_direct_writes > 3) == client.writes_directly
    assert [answer.status for answer in answers] == [200, 200]
    first, second = map(comparable, answers)
    assert first == second


@on_event_loop
async def test_log_probabilities_come_with_their_tokens_however_outputs_are_merged():
    async with scripted(by_hand=True) as client:
        opened = open_stream(client, logprobs=1)
        while not client.engine.core.added:
            await asyncio.sleep(0)
        name = client.engine.core.added[-1].request_id
        for place, character in enumerate("abcdef"):
            token = ord(character)
            rows = LogprobsLists([[token, 1]], [[-0.5, -1.0 - place]], [1])
            client.engine.send(EngineCoreOutput(name, [token], new_logprobs=rows))
            if place in (0, 1):
                while len(opened.sent) < 2 + place:
                    await asyncio.sleep(0)
            if place == 1:
                opened.reads.clear()  # the rest is merged
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(opened.sent) == 3
        opened.reads.set()
        while len(opened.sent) < 5:
            await asyncio.sleep(0)
        events = [json.loads(message["body"][6:]) for message in opened.sent[1:]]
        assert "".join(event["choices"][0]["text"] for event in events) == "abcdef"
        logprobs = [event["choices"][0]["logprobs"] for event in events]
        assert [token for one in logprobs for token in one["tokens"]] == list("abcdef")
        assert [offset for one in logprobs for offset in one["text_offset"]] == list(range(6))
        opened.disconnect()
        await opened.task


@pytest.mark.parametrize("chat", [False, True])
@on_event_loop
async def test_a_client_that_reads_late_gets_everything_in_fewer_events(chat):
    async with scripted(say("abcdefghij" * 4), by_hand=True) as client:
        opened = open_stream(client, chat, **CONTINUOUS)
        client.engine.step(3)
        await opened.sent_something()
        while opened.num_direct_writes < 2:
            await asyncio.sleep(0)
        opened.reads.clear()
        num_before = len(opened.sent)
        client.engine.step(20)
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(opened.sent) == num_before, "nothing is written to a client that does not read"
        opened.reads.set()
        client.engine.step(100)
        events = (await opened.answer()).events()
    pieces = [(one["delta"]["content"] if chat else one["text"]) for event in events for one in event["choices"]]
    assert "".join(pieces) == "abcdefghij" * 4
    assert max(map(len, pieces)) > 10
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 41


@on_event_loop
async def test_a_fault_in_one_stream_is_its_own(monkeypatch):
    async with scripted(say("abcdef"), by_hand=True) as client:
        bad, good = open_stream(client), open_stream(client)
        client.engine.step(1)
        for opened in (bad, good):
            await opened.sent_something()

        def fail(body: bytes) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(bad, "write", fail)
        client.engine.step(50)
        assert "".join(event["choices"][0]["text"] for event in (await good.answer()).events()) == "abcdef"
        assert "broken" in (await bad.answer()).events()[-1]["error"]["message"]


@on_event_loop
async def test_ids_and_names_may_have_any_characters():
    name = '100%d "quoted" \\'
    async with scripted(say("abc"), served_names=(name,)) as client:
        answer = await open_stream(client, model=name, **CONTINUOUS).answer()
    events = answer.events()
    assert [event["model"] for event in events] == [name] * 5
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == "abc"
