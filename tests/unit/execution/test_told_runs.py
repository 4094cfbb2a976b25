"""Tokens without a choice that results tell before a step has computed them: what is told and appended."""

from __future__ import annotations

from collections import deque

from ratoon.execution.sampling.told_runs import RunsOfStep, ToldRun


def step_of(branch: ToldRun, place: int, queue: deque[ToldRun], tail: list[int] | None = None) -> RunsOfStep:
    """A step whose fourth row samples the token at this place of a branch's output."""
    runs = RunsOfStep([3], [branch], [place], queue)
    runs.tails = {} if tail is None else {3: tail}
    return runs


def test_the_tokens_behind_a_sampled_one_are_told_with_it() -> None:
    queue: deque[ToldRun] = deque()
    branch = ToldRun(5, 2)
    assert step_of(branch, 2, queue).tell(()) == {} and not queue
    assert step_of(branch, 3, queue, [7, 8, 9]).tell(()) == {3: [7, 8, 9]}
    assert list(queue) == [branch] and branch.slot == 5
    assert branch.behind(4) == [7, 8, 9]
    assert branch.behind(5) == [8, 9]  # a step under way has sampled one of them
    assert branch.behind(7) == branch.behind(9) == []


def test_what_was_told_is_not_told_again() -> None:
    queue: deque[ToldRun] = deque()
    branch = ToldRun(0, 0)
    step_of(branch, 0, queue, [7, 8]).tell(())
    assert step_of(branch, 1, queue, [8]).tell(()) == {3: None}
    assert step_of(branch, 2, queue).tell(()) == {3: None}
    assert step_of(branch, 3, queue).tell(()) == {}
    assert len(queue) == 1


def test_a_row_without_a_token_tells_nothing() -> None:
    queue: deque[ToldRun] = deque()
    branch = ToldRun(0, 0)
    assert step_of(branch, 0, queue, [7, 8]).tell({3}) == {} and not queue
    assert branch.behind(1) == []
