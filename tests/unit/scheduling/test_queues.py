from __future__ import annotations

from ratoon.scheduling.branch import Branch, Request
from ratoon.scheduling.queues import FirstComeQueue, PriorityQueue
from tests.unit.scheduling.steps import request_of


def branch_of(name: str, number: int, priority: int = 0, arrival: float = 0.0) -> Branch:
    return Request(request_of(name, 3, priority=priority, arrival=arrival), number, 100).branches[0]


def drained(queue: FirstComeQueue | PriorityQueue) -> list[str]:
    order = []
    while queue:
        assert queue.peek() is next(iter(queue))
        order.append(queue.pop().branch_id)
    return order


def test_first_come_first_served_and_the_preempted_before_all() -> None:
    queue = FirstComeQueue()
    for number, name in enumerate("abc"):
        queue.add(branch_of(name, number, priority=-number))
    queue.prepend(branch_of("p", 9))
    assert drained(queue) == ["p", "a", "b", "c"]


def test_priority_goes_before_arrival_and_arrival_before_the_order_of_adding() -> None:
    queue = PriorityQueue()
    queue.add(branch_of("late", 0, priority=1, arrival=5.0))
    queue.add(branch_of("early", 1, priority=1, arrival=2.0))
    queue.add(branch_of("urgent", 2, priority=0, arrival=9.0))
    queue.add(branch_of("tie", 3, priority=1, arrival=5.0))
    assert drained(queue) == ["urgent", "early", "late", "tie"]


def test_a_preempted_branch_keeps_its_place_among_priorities() -> None:
    queue = PriorityQueue()
    queue.add(branch_of("urgent", 1, priority=0))
    queue.prepend(branch_of("preempted", 0, priority=1))
    assert drained(queue) == ["urgent", "preempted"]


def test_removed_branches_are_gone_and_the_rest_keeps_its_order() -> None:
    for queue in (FirstComeQueue(), PriorityQueue()):
        branches = [branch_of(name, number) for number, name in enumerate("abcd")]
        for branch in branches:
            queue.add(branch)
        queue.remove({branches[0], branches[2]})
        assert len(queue) == 2
        assert drained(queue) == ["b", "d"]
