"""An immutable map: setting a key returns another map, which shares all but a few nodes with the first.

Beams that fork at every step each have a map, without copies. Reading and setting take O(log16 n) time.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

BITS = 4
WIDTH = 1 << BITS
HASH_BITS = 60  # beyond these, different keys with the same hash share a leaf

# A node is None, a leaf (a tuple of (key, value) pairs), or a branch (a list of WIDTH nodes, never changed once made).
Node = Any


class PersistentMap:
    __slots__ = ("_root",)

    def __init__(self, root: Node = None) -> None:
        self._root = root

    def get(self, key: Hashable, default: Any = None) -> Any:
        node, digits = self._root, hash(key)
        while type(node) is list:
            node = node[digits & (WIDTH - 1)]
            digits >>= BITS
        for found, value in node or ():
            if found == key:
                return value
        return default

    def set(self, key: Hashable, value: Any) -> PersistentMap:
        return PersistentMap(_set(self._root, hash(key), 0, key, value))


def _set(node: Node, digits: int, depth: int, key: Hashable, value: Any) -> Node:
    if node is None:
        return ((key, value),)
    if type(node) is list:
        place = digits & (WIDTH - 1)
        changed = node.copy()
        changed[place] = _set(node[place], digits >> BITS, depth + BITS, key, value)
        return changed
    others = tuple([pair for pair in node if pair[0] != key])
    if not others or depth >= HASH_BITS:
        return (*others, (key, value))
    branch: Node = [None] * WIDTH
    for other, its_value in (*others, (key, value)):
        place = (hash(other) >> depth) & (WIDTH - 1)
        branch[place] = _set(branch[place], hash(other) >> (depth + BITS), depth + BITS, other, its_value)
    return branch
