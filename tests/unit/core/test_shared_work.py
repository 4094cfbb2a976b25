"""Callers that wait for the same work leave one by one, and the work is given up with the last of them."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from ratoon.core.shared_work import SharedWork


def make() -> tuple[SharedWork[int], list[str]]:
    told: list[str] = []
    return SharedWork(lambda: told.append("abandoned")), told


def join(work: SharedWork[int]) -> Future[int]:
    future = work.join()
    assert future is not None
    return future


def test_all_that_wait_get_the_result() -> None:
    work, told = make()
    futures = [join(work) for _ in range(3)]
    work.set_result(5)
    assert [future.result(0) for future in futures] == [5] * 3
    assert work.is_over and work.join() is None and told == []


def test_all_that_wait_get_the_error() -> None:
    work, _ = make()
    future = join(work)
    work.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        future.result(0)


def test_it_is_abandoned_with_the_last_one() -> None:
    work, told = make()
    first, second = join(work), join(work)
    assert first.cancel() and told == [] and not work.is_over
    third = join(work)
    assert second.cancel() and told == []
    assert third.cancel() and told == ["abandoned"]
    assert work.is_over and work.join() is None
    work.set_result(1)  # comes too late, and is of no use to any caller
    assert third.cancelled()


def test_leaving_with_the_result_in_hand_abandons_nothing() -> None:
    work, told = make()
    future = join(work)
    work.set_result(1)
    assert not future.cancel() and future.result(0) == 1 and told == []


def test_callers_that_leave_while_the_result_comes_end_in_one_way() -> None:
    for _ in range(200):
        work, told = make()
        futures = [join(work) for _ in range(2)]
        threads = [threading.Thread(target=future.cancel) for future in futures]
        threads.append(threading.Thread(target=work.set_result, args=(1,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(future.done() for future in futures) and len(told) <= 1
        assert not told or all(future.cancelled() for future in futures)
