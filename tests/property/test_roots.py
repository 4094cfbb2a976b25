"""The table of roots under random use, compared with a plain dict and a list of what was asked for when."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ratoon.core.errors import UnknownParentError
from ratoon.engine.output.roots import Root, RootTable

MAX_ROOTS = 5
OWNERS = st.sampled_from([None, "ada", "bob"])
IDS = st.sampled_from(["a", "b", "c", "d"])  # with three owners more than the table holds
Key = tuple[str | None, str]


class RootTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = RootTable(MAX_ROOTS)
        self.expected: dict[Key, Root] = {}
        self.order: list[Key] = []  # the one that was not asked for longest is first
        self.time = 0.0

    @rule(owner=OWNERS, request_id=IDS)
    def add(self, owner: str | None, request_id: str) -> None:
        """Also an id that is there: the newer answer takes its place."""
        self.time += 1
        root = Root(request_id, f"internal-{self.time}", [1], [[2]], owner=owner, ended_at=self.time)
        self.table.add(root)
        self.expected[owner, request_id] = root
        self.asked_for(owner, request_id)
        if len(self.order) > MAX_ROOTS:
            self.forget_one()

    def forget_one(self) -> None:
        """Of an owner that has most, the one that was not asked for longest."""
        counts = Counter(owner for owner, _ in self.order)
        (gone,) = [key for key in self.order if key[1] not in [root.request_id for root in self.table.list(key[0])]]
        assert counts[gone[0]] == max(counts.values()), "another owner has more"
        assert gone == next(key for key in self.order if key[0] == gone[0])
        self.order.remove(gone)
        del self.expected[gone]

    @rule(owner=OWNERS, request_id=IDS)
    def find(self, owner: str | None, request_id: str) -> None:
        if (owner, request_id) in self.expected:
            assert self.table.find(request_id, owner) is self.expected[owner, request_id]
            self.asked_for(owner, request_id)
        else:
            self.refuses(self.table.find, owner, request_id)

    @rule(owner=OWNERS, request_id=IDS)
    def remove(self, owner: str | None, request_id: str) -> None:
        if (owner, request_id) in self.expected:
            assert self.table.remove(request_id, owner) is self.expected.pop((owner, request_id))
            self.order.remove((owner, request_id))
        else:
            self.refuses(self.table.remove, owner, request_id)

    @rule(owner=OWNERS)
    def show(self, owner: str | None) -> None:
        """Listing does not count as use: it keeps no root in the table."""
        own = [root for (whose, _), root in self.expected.items() if whose == owner]
        assert self.table.list(owner) == sorted(own, key=lambda root: -root.ended_at)

    @rule(garbage=st.sampled_from([None, 7, ["a"], {"a": 1}, ""]), owner=OWNERS)
    def find_what_is_no_id(self, garbage: object, owner: str | None) -> None:
        self.refuses(self.table.find, owner, garbage)

    @invariant()
    def holds_what_it_should(self) -> None:
        assert len(self.table) == len(self.expected) == len(self.order) <= MAX_ROOTS

    def asked_for(self, owner: str | None, request_id: str) -> None:
        if (owner, request_id) in self.order:
            self.order.remove((owner, request_id))
        self.order.append((owner, request_id))

    def refuses(self, ask, owner: str | None, request_id: object) -> None:
        """With the same text, whether it never existed, was forgotten, or belongs to another owner."""
        with pytest.raises(UnknownParentError) as refused:
            ask(request_id, owner)
        assert refused.value.field == "continuation_of"
        assert refused.value.problem == f"there is no request {request_id!r} to continue"


TestRootTable = RootTableMachine.TestCase
