from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ratoon.core.shares import SharedLimit


def test_without_owners_it_is_a_plain_limit() -> None:
    limit = SharedLimit(10)
    assert limit.take(None, 10)
    assert not limit.take(None, 1)
    limit.give_back(None, 4)
    assert limit.take(None, 4) and not limit.take(None, 1)


def test_one_owner_alone_may_take_everything() -> None:
    limit = SharedLimit(10)
    assert limit.take("ada", 10) and not limit.take("ada", 1)


def test_what_one_owner_holds_does_not_keep_another_from_its_share() -> None:
    limit = SharedLimit(10)
    assert limit.take("ada", 10)
    assert limit.take("bob", 5)
    assert not limit.take("bob", 1) and not limit.take("ada", 1)
    assert limit.take("eve", 3) and not limit.take("eve", 1)
    limit.give_back("ada", 10)
    assert limit.take("bob", 2), "there is room again"


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(1, 12), st.booleans()), max_size=60),
)
def test_nobody_is_refused_below_its_share_and_counts_add_up(size: int, wishes: list) -> None:
    limit = SharedLimit(size)
    held: dict[str | None, int] = {}
    for owner, count, gives_back in wishes:
        if gives_back:
            if owner in held:
                limit.give_back(owner, held.pop(owner))
            continue
        total, owners = sum(held.values()), held.keys() | {owner}
        taken = limit.take(owner, count)
        if total + count <= size or (len(owners) > 1 and held.get(owner, 0) + count <= size // len(owners)):
            assert taken
        else:
            assert not taken
        if taken:
            held[owner] = held.get(owner, 0) + count
        assert limit.total == sum(held.values())
        assert all(limit.held_by(name) == amount for name, amount in held.items())
        assert limit.total <= size * (1 + 1 / 2 + 1 / 3 + 1 / 4)
