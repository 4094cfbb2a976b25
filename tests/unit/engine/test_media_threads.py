"""Threads in which prompts with images are read: owners take turns, and a place is free when its work has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Event

import pytest

from ratoon.engine.input.media_threads import MediaThreads
from tests.unit.engine.fakes_async import on_event_loop
from tests.waiting import PATIENCE, until


class Jobs:
    """Work that ends when it is told to, in the order in which it began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._ends: dict[str, Event] = {}

    def work(self, name: str) -> Callable[[], str]:
        self._ends[name] = Event()

        def run() -> str:
            self.begun.append(name)
            assert self._ends[name].wait(PATIENCE)
            return name.upper()

        return run

    def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()


@on_event_loop
async def test_an_owner_with_one_job_is_not_behind_one_with_many() -> None:
    threads, jobs = MediaThreads(2), Jobs()
    many = [asyncio.create_task(threads.run(jobs.work(f"a{index}"), "a")) for index in range(4)]
    await until("one of them runs", lambda: jobs.begun == ["a0"])
    other = asyncio.create_task(threads.run(jobs.work("b0"), "b"))
    await until("the other owner's runs beside it", lambda: jobs.begun == ["a0", "b0"])
    jobs.end("b0", "a0")
    assert await other == "B0"
    await until("the next one runs", lambda: jobs.begun == ["a0", "b0", "a1"])
    jobs.end("a1", "a2", "a3")
    assert await asyncio.gather(*many) == ["A0", "A1", "A2", "A3"]
    threads.close()


@on_event_loop
async def test_callers_that_leave_take_no_place_and_free_none_before_the_end() -> None:
    threads, jobs = MediaThreads(1), Jobs()
    first = asyncio.create_task(threads.run(jobs.work("first"), None))
    await until("it runs", lambda: jobs.begun == ["first"])
    waiting = asyncio.create_task(threads.run(jobs.work("waiting"), None))
    last = asyncio.create_task(threads.run(jobs.work("last"), None))
    await asyncio.sleep(0)
    for left in (waiting, first):
        left.cancel()
        with suppress(asyncio.CancelledError):
            await left
    for _ in range(10):
        await asyncio.sleep(0)
    assert jobs.begun == ["first"], "its thread is still busy"
    jobs.end("first", "last")
    assert await last == "LAST"
    assert jobs.begun == ["first", "last"]
    threads.close()


@on_event_loop
async def test_an_error_is_the_callers_and_frees_the_place() -> None:
    threads = MediaThreads(1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0, None)
    assert await threads.run(lambda: 5, None) == 5
    threads.close()
