"""A limit that several owners (API keys) share: who may take how much of it.

One owner alone may take all of it. Where several hold something, each has an equal share, and what others hold never
keeps an owner from its share.
"""

from __future__ import annotations

from collections.abc import Mapping


def has_room(held: Mapping[str | None, int], owner: str | None, count: int, limit: int) -> bool:
    """May this owner take so much more, where owners hold so much of the limit? Owners that hold nothing are not in
    `held`."""
    if sum(held.values()) + count <= limit:
        return True
    num_owners = len(held) + (owner not in held)
    return num_owners > 1 and held.get(owner, 0) + count <= limit // num_owners


class SharedLimit:
    """Counts what each owner holds. Without owners (all of them None) it is a plain limit.

    An owner that was alone may hold more than its share when others come. They get their shares nevertheless: the total
    may then exceed the limit until the first one has given back, by less than the limit for each doubling of owners.
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
        """Those that hold something."""
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
