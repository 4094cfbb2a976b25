"""The link between two processes of a service: calls in both directions, errors, order, and its end."""

import asyncio
import socket

import pytest

from ratoon.core.errors import EngineAwayError, EngineError, UnknownParentError
from ratoon.core.wire import WireTensor
from ratoon.engine.processes.link import Link, Method, Methods
from tests.waiting import PATIENCE

LEFT = Methods({"note": Method((str,)), "add": Method((int, int), int), "slow": Method((int,), int)})
RIGHT = Methods({"tensor": Method((WireTensor,), WireTensor), "fail": Method((), None)})


async def pair(left, right):
    ends = socket.socketpair()
    return await Link.open(ends[0], LEFT, RIGHT, left), await Link.open(ends[1], RIGHT, LEFT, right)


def run(work):
    asyncio.run(asyncio.wait_for(work, PATIENCE))


def test_calls_are_answered_in_both_directions_and_begun_in_order():
    async def work():
        seen = []

        async def slow(number):
            seen.append(number)
            await asyncio.sleep(0.01)
            return number

        def refuse():
            raise UnknownParentError("continuation_of", "there is none", "another")

        left, right = await pair(
            {"note": seen.append, "add": lambda a, b: a + b, "slow": slow},
            {"tensor": lambda tensor: tensor, "fail": refuse},
        )
        first = right.call("slow", 1)
        right.tell("note", "behind")
        assert await right.call("add", 2, 3) == 5 and not first.done()
        assert (await first == 1 and seen == ["behind", 1]) or seen == [1, "behind"]
        large = WireTensor("uint8", (300_000,), bytes(range(250)) * 1200)
        assert await left.call("tensor", large) == large
        with pytest.raises(UnknownParentError, match="there is none; another"):
            await left.call("fail")
        left.close()

    run(work())


def test_an_error_that_is_no_error_of_ours_arrives_as_one_of_the_engine():
    async def work():
        left, right = await pair({"add": lambda a, b: a // b}, {})
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await right.call("add", 1, 0)
        right.close()
        await left.lost

    run(work())


def test_who_waits_for_a_process_that_ends_is_told():
    async def work():
        left, right = await pair({"slow": lambda number: asyncio.sleep(100)}, {})
        waiting = right.call("slow", 1)
        await asyncio.sleep(0.01)
        left.abort()
        with pytest.raises(EngineAwayError):
            await waiting
        assert not right.is_open
        with pytest.raises(EngineAwayError):
            await right.call("slow", 2)
        right.tell("note", "to nobody")

    run(work())


@pytest.mark.parametrize(
    "sent", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x01\x00\x00\x00" + bytes([3] + [0] * 7) + b"abc"]
)
def test_what_is_no_message_ends_the_link(sent):
    async def work():
        ours, theirs = socket.socketpair()
        link = await Link.open(ours, LEFT, RIGHT, {})
        theirs.sendall(sent)
        await link.lost
        theirs.close()

    run(work())


def test_a_name_that_is_not_in_the_table_does_not_exist():
    async def work():
        ends = socket.socketpair()
        left = await Link.open(ends[0], LEFT, RIGHT, {"close": lambda: None})
        right = await Link.open(ends[1], RIGHT, Methods({"close": Method()}), {})
        with pytest.raises(EngineAwayError):
            await right.call("close")
        await left.lost

    run(work())
