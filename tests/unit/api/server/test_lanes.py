"""Threads for long work: the short does not wait behind it, and what nothing waits for any more is not done."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref

import pytest

from ratoon.api.server.threads import LANES, WorkLanes
from tests.unit.api.server.harness import MAX_MODEL_LEN, byte_tokenizer, scripted
from tests.unit.engine.fakes_async import on_event_loop
from tests.waiting import until

HUGE = 2**22


@on_event_loop
async def test_short_work_is_done_while_all_long_work_waits() -> None:
    lanes = WorkLanes("test", 10)
    gate = threading.Event()
    long = [asyncio.ensure_future(lanes.run(size, gate.wait)) for size in (HUGE, HUGE, HUGE, 2**18, 2**18)]
    await asyncio.sleep(0)
    try:
        assert await lanes.run(1, lambda: "here") == "here"
        assert await lanes.run(5000, lambda: "in a thread") == "in a thread"
        assert not any(work.done() for work in long)
    finally:
        gate.set()
    assert await asyncio.gather(*long) == [True] * 5


class Text:
    """Can be referred to weakly."""


@on_event_loop
async def test_work_that_is_cancelled_before_its_turn_is_dropped_with_all_that_it_holds() -> None:
    lanes = WorkLanes("test", 10)
    gate, done = threading.Event(), []
    first = asyncio.ensure_future(lanes.run(HUGE, gate.wait))
    text = Text()
    seen = weakref.ref(text)

    def work(text: Text = text) -> None:
        done.append(text)

    waiting = asyncio.ensure_future(lanes.run(HUGE, work))
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    del text, work, waiting
    gc.collect()
    await until("it is dropped, and not kept in the queue", lambda: seen() is None)
    gate.set()
    assert await first
    assert await lanes.run(HUGE, lambda: "next") == "next"
    assert not done


@on_event_loop
async def test_errors_come_out_of_the_thread() -> None:
    with pytest.raises(ZeroDivisionError):
        await WorkLanes("test", 10).run(HUGE, lambda: 1 // 0)


def test_every_size_has_a_lane() -> None:
    assert LANES[-1].below == float("inf")


class CountingTokenizer:
    """The same tokenizer, which notes what it was asked to tokenise."""

    def __init__(self) -> None:
        self.inner = byte_tokenizer()
        self.sizes: list[int] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.sizes.append(len(text))
        return self.inner.encode(text, add_special_tokens)

    def __getattr__(self, name: str):
        return getattr(self.inner, name)


LONG = "too long " * 10_000


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["x", LONG]}, "prompt[1]"),
        ("/v1/completions", {"continuation_of": "cmpl-x", "continuation_suffix": LONG}, "continuation_suffix"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "continuation_of": "x"}, "messages"),
        ("/v1/embeddings", {"input": LONG}, "input"),
        ("/v1/hidden_states", {"prompt": LONG}, "prompt"),
    ],
)
@on_event_loop
async def test_what_is_too_long_is_refused_before_it_is_tokenised(path: str, fields: dict, param: str) -> None:
    tokenizer = CountingTokenizer()
    async with scripted(tokenizer=tokenizer) as client:
        answer = await client.post(path, {"model": "tiny", **fields})
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded"), answer.body
        assert answer.error["param"] == param
        assert "at least" in answer.error["message"]
        assert str(MAX_MODEL_LEN) in answer.error["message"]
    assert all(size < len(LONG) for size in tokenizer.sizes)


@on_event_loop
async def test_tokens_are_counted_of_texts_longer_than_the_model_but_not_of_any_length() -> None:
    tokenizer = CountingTokenizer()
    async with scripted(tokenizer=tokenizer) as client:
        assert (await client.post("/tokenize", {"prompt": LONG})).json()["count"] == len(LONG)
        sizes = list(tokenizer.sizes)
        for body in ({"prompt": "x" * (5 * 2**20)}, {"messages": [{"role": "user", "content": "x" * (5 * 2**20)}]}):
            answer = await client.post("/tokenize", body)
            assert answer.status == 400
            assert "characters; at most" in answer.error["message"]
        assert tokenizer.sizes == sizes
