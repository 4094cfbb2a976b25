"""A limit shared by several owners (API keys), and how much of it each may take.

A single owner may take all of it. With several active owners each is guaranteed an equal share, regardless of what the
others hold.
"""

from __future__ import annotations

from collections.abc import Mapping


def has_room(held: Mapping[str | None, int], owner: str | None, count: int, limit: int) -> bool:
    """Whether this owner may take `count` more of the limit. Owners that hold nothing are not in `held`."""
    if sum(held.values()) + count <= limit:
        return True
    num_owners = len(held) + (owner not in held)
    return num_owners > 1 and held.get(owner, 0) + count <= limit // num_owners


class SharedLimit:
    """Counts what each owner holds. Without owners (all None) it is a plain limit.

    A single owner may hold more than its share when others arrive. They get their shares nevertheless: the total may
    exceed the limit until the first one gives back, by less than the limit per doubling of owners.
    """

    __slots__ = ("_held", "limit", "total")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._held: dict[str | None, int] = {}

    def held_by(self, owner: str | None) -> int:
        return self._held.get(owner, 0)

    @property
    def num_owners(self) -> int:
        """Owners that hold more than 0."""
        return len(self._held)

    def take(self, owner: str | None, count: int) -> bool:
        """False: there is no room, and nothing was taken."""
        if not has_room(self._held, owner, count, self.limit):
            return False
        self.total += count
        self._held[owner] = self._held.get(owner, 0) + count
        return True

    def give_back(self, owner: str | None, count: int) -> None:
        left = self._held[owner] - count
        assert left >= 0, "more is given back than was taken"
        self.total -= count
        if left:
            self._held[owner] = left
        else:
            del self._held[owner]
