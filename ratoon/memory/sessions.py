"""Sessions: which blocks their newest roots need, and which only superseded ones do. Accounting only.

A session is a name, private to an owner and a salt, under which texts end. Each text that ends is a root. A root is
superseded when a later text of its session contains it whole, or contains its whole prompt and goes on in another way:
a chat template may render an earlier answer without its reasoning. Roots that are not superseded are the session's
newest: one, or several where it has branches. What only superseded roots needed is the first to go, from the device,
from host memory and from a connector; what a newest root needs goes after what no session needs. Blocks are counted by
hash, so that a prefix that several roots or sessions share counts for each. There is no clock: sessions are forgotten
by least recent use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ratoon.core.kv_connector import block_key
from ratoon.core.stats import SessionStats
from ratoon.memory.block_pool import BlockPool
from ratoon.memory.block_store import BlockStore
from ratoon.memory.sequence import TokenSequence

SessionKey = tuple[str | None, str | None, str]  # owner, salt, name

MAX_BRANCHES = 32  # newest roots of a session; beyond, the one that ended first is as any other text
MAX_TEXTS_BETWEEN = 4096  # texts of others that end between two of a session: with more, it is forgotten
TRACKED_BY_BLOCK = 8  # blocks of newest roots that are known, for each block of the device and of host memory
LEAST_TRACKED = 1 << 14


@dataclass(slots=True, eq=False)
class SessionRoot:
    """A text that has ended in a session."""

    branch_id: str
    request_id: str
    num_prompt_tokens: int
    hashes: dict[int, list[bytes]]  # of its full blocks, by block size

    def contains(self, other: SessionRoot, size: int, num_blocks: int) -> bool:
        """Whether it begins with the first so many blocks of another: hashes are chained, so the last one tells."""
        own, others = self.hashes[size], other.hashes[size]
        return num_blocks == 0 or (len(own) >= num_blocks and own[num_blocks - 1] == others[num_blocks - 1])


@dataclass(slots=True)
class Session:
    roots: list[SessionRoot] = field(default_factory=list)  # the newest ones, in the order in which they ended
    last_used: int = 0  # number of the text that ended last in it


class SessionTable:
    def __init__(self, pool: BlockPool, store: BlockStore, sizes: Sequence[int], num_groups: int) -> None:
        """`sizes`: tokens of a block, of each group whose blocks are hashed by tokens. There are `num_groups` in
        all."""
        self._pool = pool
        self._store = store
        self._size = min(sizes)
        self._groups = {
            size: [group for group, one in enumerate(sizes) if one == size] for size in dict.fromkeys(sizes)
        }
        self._counts: dict[int, dict[bytes, int]] = {size: {} for size in self._groups}  # newest roots that need a hash
        nothing: frozenset[bytes] = frozenset()
        self._needed = [*(self._counts[size] for size in sizes), *[nothing] * (num_groups - len(sizes))]
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()  # the least recently used first
        self._num_texts = 0
        self._num_tracked = 0
        self._superseded = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def newest(self, key: SessionKey) -> list[str]:
        """The branches that the newest roots of a session were, in the order in which they ended."""
        session = self._sessions.get(key)
        return [] if session is None else [root.branch_id for root in session.roots]

    def pass_text(self) -> None:
        """A text has ended that belongs to no session."""
        if self._sessions:
            self._num_texts += 1
            self._forget_old()

    def add(
        self, key: SessionKey, ended: TokenSequence, num_prompt_tokens: int, request_id: str, is_branch: bool = False
    ) -> list[str]:
        """A text has ended in a session. All its full blocks are hashed, and it still has its memory. Returns the
        branches that the roots were which it supersedes. `is_branch`: it supersedes only what it contains whole."""
        self._num_texts += 1
        session = self._sessions.setdefault(key, Session())
        self._sessions.move_to_end(key)
        session.last_used = self._num_texts
        hashes = {size: ended.block_hashes[size][: ended.num_computed_tokens // size] for size in self._groups}
        new = SessionRoot(ended.branch_id, request_id, num_prompt_tokens, hashes)
        num_blocks = len(hashes[self._size])
        superseded: list[SessionRoot] = []
        if num_blocks and not any(root.contains(new, self._size, num_blocks) for root in session.roots):
            superseded = [root for root in session.roots if self._supersedes(new, root, is_branch)]
            session.roots = [root for root in session.roots if root not in superseded]
            session.roots.append(new)
            self._hold(new, superseded)
            for root in superseded:
                self._let_go(root, self._put_first)
            while len(session.roots) > MAX_BRANCHES:
                self._let_go(session.roots.pop(0), self._put_in_order)
        elif not session.roots:
            del self._sessions[key]
        self._superseded += len(superseded)
        self._forget_old()
        return [root.branch_id for root in superseded]

    def _supersedes(self, new: SessionRoot, old: SessionRoot, is_branch: bool) -> bool:
        size = self._size
        if new.contains(old, size, len(old.hashes[size])):
            return True
        num_of_prompt = min(old.num_prompt_tokens // size, len(old.hashes[size]))
        is_later = new.num_prompt_tokens > old.num_prompt_tokens and new.request_id != old.request_id
        return not is_branch and is_later and num_of_prompt > 0 and new.contains(old, size, num_of_prompt)

    def let_lease_go(self, block_hashes: Mapping[int, list[bytes]], num_tokens: int) -> None:
        """The lease of a superseded root has ended, with so many computed tokens: what no newest root needs of it is
        the first to go."""
        hashes = {size: block_hashes[size][: num_tokens // size] for size in self._groups}
        for size, block_hash in _from_the_end(hashes):
            if block_hash not in self._counts[size]:
                self._put_first(size, block_hash)

    def forget(self, key: SessionKey) -> None:
        """A session is known no more: its blocks are as any others."""
        for root in self._sessions.pop(key).roots:
            self._let_go(root, self._put_in_order)

    def clear(self) -> None:
        """No content of any block is there any more."""
        for key in list(self._sessions):
            self.forget(key)

    def _forget_old(self) -> None:
        tier = self._store.tier
        num_blocks = self._pool.num_blocks + (0 if tier is None else tier.num_blocks)
        most = max(LEAST_TRACKED, TRACKED_BY_BLOCK * num_blocks)
        while self._sessions:
            key, session = next(iter(self._sessions.items()))
            is_old = self._num_texts - session.last_used > MAX_TEXTS_BETWEEN
            if not is_old and (self._num_tracked <= most or len(self._sessions) == 1):
                return
            self.forget(key)

    # ---- counts ----

    def _hold(self, new: SessionRoot, superseded: list[SessionRoot]) -> None:
        """Count the blocks of a new root. Those that it shares with the last root that it supersedes are handed over,
        so that a turn of a long session costs what is new in it."""
        before = superseded[-1] if superseded else None
        for size, hashes in new.hashes.items():
            others = [] if before is None else before.hashes[size]
            num_shared = _num_common(hashes, others)
            del others[:num_shared]
            counts = self._counts[size]
            for block_hash in hashes[num_shared:]:
                count = counts.get(block_hash, 0)
                counts[block_hash] = count + 1
                if not count:
                    self._put_in_order(size, block_hash)
            if size == self._size:
                self._num_tracked += len(hashes) - num_shared
        self._pool.needed = self._needed
        if self._store.tier is not None:
            self._store.tier.needed = self._needed

    def _let_go(self, root: SessionRoot, put: Callable[[int, bytes], None]) -> None:
        """A root is no newest one any more: what no other needs is put where it belongs, the last blocks first."""
        self._num_tracked -= len(root.hashes[self._size])
        for size, block_hash in _from_the_end(root.hashes):
            left = self._counts[size].pop(block_hash) - 1
            if left:
                self._counts[size][block_hash] = left
            else:
                put(size, block_hash)

    def _put_first(self, size: int, block_hash: bytes) -> None:
        for group in self._groups[size]:
            self._pool.put_first(block_hash, group)
            if self._store.tier is not None:
                self._store.tier.put_first(block_hash, group)
            if self._store.index is not None:
                self._store.index.supersede(block_key(group, block_hash))

    def _put_in_order(self, size: int, block_hash: bytes) -> None:
        for group in self._groups[size]:
            self._pool.put_in_order(block_hash, group)
            if self._store.tier is not None:
                self._store.tier.put_in_order(block_hash, group)

    # ---- figures and checks ----

    def snapshot(self) -> SessionStats:
        num_roots = sum(len(session.roots) for session in self._sessions.values())
        return SessionStats(len(self._sessions), num_roots, self._num_tracked, self._superseded)

    def check(self) -> None:
        """Raise AssertionError unless the counts are those of the newest roots."""
        counts: dict[int, dict[bytes, int]] = {size: {} for size in self._groups}
        tracked = 0
        for key, session in self._sessions.items():
            assert session.roots, f"session {key} has no root"
            assert len(session.roots) <= MAX_BRANCHES, f"session {key} has {len(session.roots)} newest roots"
            for root in session.roots:
                tracked += len(root.hashes[self._size])
                for size, block_hash in _from_the_end(root.hashes):
                    counts[size][block_hash] = counts[size].get(block_hash, 0) + 1
        assert counts == self._counts, "blocks of newest roots are miscounted"
        assert tracked == self._num_tracked, f"{tracked} blocks are tracked, {self._num_tracked} counted"


def _num_common(hashes: list[bytes], others: list[bytes]) -> int:
    """The length of what two chains have in common: where one hash is equal, so are all before it."""
    low, high = 0, min(len(hashes), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _from_the_end(hashes: dict[int, list[bytes]]) -> Iterator[tuple[int, bytes]]:
    return ((size, block_hash) for size, chain in hashes.items() for block_hash in reversed(chain))
