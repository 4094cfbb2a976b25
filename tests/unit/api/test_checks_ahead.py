"""The grammars of a batch are checked beside each other, and no further than its first error."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from ratoon.api import batches
from ratoon.api.batches import ChecksAhead
from ratoon.core.errors import QueueFullError


class Checks:
    def __init__(self) -> None:
        self.begun: dict[Any, Future[Any]] = {}
        self.num_places = 100

    def check(self, params: Any) -> Future[Any] | None:
        if params is None:
            return None
        if len(self.begun) == self.num_places:
            raise QueueFullError("structured_output", "is one too many", "wait")
        self.begun[params] = Future()
        return self.begun[params]


def test_several_are_begun_before_the_first_is_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(batches, "NUM_CHECKS_AHEAD", 3)
    checks = Checks()
    ahead = ChecksAhead(checks.check, ["a", None, "b", "c", "d"])
    ahead.advance()
    assert list(checks.begun) == ["a", "b"]
    ahead.advance()
    assert list(checks.begun) == ["a", "b", "c"]
    for _ in range(3):
        ahead.advance()
    assert list(checks.begun) == ["a", "b", "c", "d"]


def test_those_that_are_left_are_cancelled() -> None:
    checks = Checks()
    ahead = ChecksAhead(checks.check, ["a", None, "b"])
    ahead.advance()
    checks.begun["a"].set_result(None)
    ahead.close()
    assert not checks.begun["a"].cancelled() and checks.begun["b"].cancelled()


def test_a_full_queue_is_no_error_of_the_batch() -> None:
    checks = Checks()
    checks.num_places = 1
    ahead = ChecksAhead(checks.check, ["a", "b"])
    ahead.advance()
    assert list(checks.begun) == ["a"]
    checks.num_places = 2
    ahead.advance()
    assert list(checks.begun) == ["a", "b"]
