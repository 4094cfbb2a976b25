"""Drafts from roots: what ended requests of the same owner contain behind the same words.

An agent that rewrites a file, a turn that is tried again, a template that repeats: their text is there already. The
index has the prompt and the output of every request that has ended and is kept as a root; it is told when a root is
forgotten. Texts of different owners, cache salts or adapters are in indexes of their own, so that no draft, and no time
that a draft saves, tells one of them what another has written. Each engine has its own; it does not outlive the engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ratoon.scheduling.branch import Branch
from ratoon.scheduling.drafters.suffix_index import (
    ANCHOR_BYTES,
    NO_MATCH,
    TEXT_BYTES,
    TOKEN_BYTES,
    Match,
    Place,
    SuffixIndex,
    follow,
)

TOKENS_AT_ONCE = 4096  # that are linked or unlinked beside a step: one or two milliseconds
TOKENS_BETWEEN_COUNTS = 512  # of the memory: by what these take, it may exceed its limit

# What two texts must have in common for one to be drafted from the other: the owner, and what else the prefix cache
# compares (salt, adapter, encoder input)
ScopeKey: TypeAlias = tuple[str | None, bytes]


@dataclass(slots=True)
class _BranchPlace:
    """Where a branch is in the texts of its scope. It is followed token by token, and looked up where it is lost."""

    num_tokens: int  # that the branch had
    num_cuts: int  # of the index
    match: Match


@dataclass(slots=True, eq=False)
class _Scope:
    key: ScopeKey
    index: SuffixIndex = field(default_factory=SuffixIndex)
    places: dict[Branch, _BranchPlace] = field(default_factory=dict)
    num_bytes: int = 0  # of the index, as it is counted for its owner


@dataclass(slots=True)
class _Owner:
    texts: OrderedDict[str, _Scope] = field(default_factory=OrderedDict)  # by name; the least recently used one first
    num_bytes: int = 0


class RootsDrafter:
    name = "roots"

    def __init__(self, max_bytes: int, min_probability: float = 0.1, max_factor: float = 1.0) -> None:
        """`max_bytes`: of all texts together. `min_probability`: a draft ends where fewer than this share of the texts
        behind the match agree with all of it. `max_factor`: how many times as long as the match a draft may be."""
        self._max_bytes = max_bytes
        self._min_probability = min_probability
        self._max_factor = max_factor
        self._scopes: dict[ScopeKey, _Scope] = {}
        self._owners: dict[str | None, _Owner] = {}
        self._owner_of: dict[str, _Owner] = {}  # by the names of texts
        self._at_work: dict[_Scope, None] = {}  # that have something to link or unlink
        self.num_bytes = 0

    def __len__(self) -> int:
        """Returns the number of texts."""
        return len(self._owner_of)

    # ---- drafts ----

    def propose(self, branch: Branch, max_tokens: int) -> Sequence[int]:
        scope = self._scopes.get(_scope_key(branch))
        if scope is None:
            return ()
        match = self._locate(scope, branch)
        if not match.places:
            return ()
        limit = min(max_tokens, max(1, int(match.length * self._max_factor)))
        places, probability = match.places, 1.0
        draft: list[int] = []
        while places and len(draft) < limit:
            run = _common_run(places, limit - len(draft))
            if not run:
                token, share = _vote(places)
                probability *= share
                if probability < self._min_probability:
                    break
                run = [token]
            draft += run
            places = follow([(node, position + len(run) - 1) for node, position in places], run[-1])
        return draft

    def _locate(self, scope: _Scope, branch: Branch) -> Match:
        """Returns where the branch is in the texts of its scope."""
        index, place, match = scope.index, scope.places.get(branch), NO_MATCH
        if place is not None and place.match.places and place.num_cuts == index.num_cuts:
            places, new = place.match.places, branch.token_ids[place.num_tokens :]
            for token in new:
                places = follow(places, token)
            match = Match(places, place.match.length + len(new))
        if not match.places:
            match = index.find(branch.token_ids)
            if match.places:
                self._note_use(match)
        if match.places:
            scope.places[branch] = _BranchPlace(branch.num_tokens, index.num_cuts, match)
        elif place is not None:
            del scope.places[branch]
        return match

    def _note_use(self, match: Match) -> None:
        node, _ = match.places[0]
        for name in node.texts:
            self._owner_of[name].texts.move_to_end(name)

    def num_matched(self, branch: Branch) -> int:
        scope = self._scopes.get(_scope_key(branch))
        place = None if scope is None else scope.places.get(branch)
        return 0 if place is None else place.match.length

    def drop(self, branch: Branch) -> None:
        scope = self._scopes.get(_scope_key(branch))
        if scope is not None:
            scope.places.pop(branch, None)

    # ---- texts ----

    def add(self, branch: Branch) -> None:
        """Adds the text of a branch that has ended. It is drafted from when `work` has linked it; `work` also takes
        texts out where they are too many."""
        name, key = branch.branch_id, _scope_key(branch)
        self.forget([name])
        if TEXT_BYTES + branch.num_tokens * (TOKEN_BYTES + ANCHOR_BYTES) > self._max_bytes:
            return  # it would only drive out all others
        scope = self._scopes.get(key)
        if scope is None:
            scope = self._scopes[key] = _Scope(key)
        owner = self._owners.setdefault(key[0], _Owner())
        owner.texts[name] = scope
        self._owner_of[name] = owner
        scope.index.add(name, branch.token_ids)
        self._note_change(scope)

    def forget(self, names: Iterable[str]) -> None:
        """Drops the texts of roots that are forgotten. Nothing is drafted from them any more; `work` frees their
        memory. Unknown names are passed over."""
        for name in names:
            owner = self._owner_of.pop(name, None)
            if owner is not None:
                scope = owner.texts.pop(name)
                scope.index.remove(name)
                self._note_change(scope)

    @property
    def has_work(self) -> bool:
        return bool(self._at_work)

    def work(self, num_tokens: int = TOKENS_AT_ONCE) -> None:
        """Links and unlinks texts, about so many tokens of them, and takes those out that are too many: the least
        recently used one of the owner that has most."""
        while self._at_work and num_tokens > 0:
            freeing = next((scope for scope in self._at_work if scope.index.is_freeing), None)
            scope = freeing or next(iter(self._at_work))
            at_once = min(num_tokens, TOKENS_BETWEEN_COUNTS)
            num_tokens += scope.index.work(at_once) - at_once
            self._note_change(scope)
            if self.num_bytes > self._max_bytes and freeing is None:
                largest = max(self._owners.values(), key=lambda owner: owner.num_bytes)
                self.forget([next(iter(largest.texts))])

    def _note_change(self, scope: _Scope) -> None:
        """Counts the memory of an index that has changed, and drops it where it is empty."""
        index, owner_name = scope.index, scope.key[0]
        owner = self._owners[owner_name]
        change = index.num_bytes - scope.num_bytes
        scope.num_bytes += change
        owner.num_bytes += change
        self.num_bytes += change
        if index.has_work:
            self._at_work[scope] = None
            return
        self._at_work.pop(scope, None)
        if not len(index):
            del self._scopes[scope.key]
            owner.num_bytes -= scope.num_bytes
            self.num_bytes -= scope.num_bytes
            if not owner.num_bytes:
                del self._owners[owner_name]

    def check(self) -> None:
        """Raises AssertionError unless texts and counts agree. Slow: for tests."""
        for scope in self._scopes.values():
            scope.index.check()
            assert scope.num_bytes == scope.index.num_bytes, "the memory of a scope is miscounted"
        assert self.num_bytes == sum(scope.num_bytes for scope in self._scopes.values())
        assert self.num_bytes == sum(owner.num_bytes for owner in self._owners.values())
        assert sum(len(owner.texts) for owner in self._owners.values()) == len(self._owner_of)
        assert sum(len(scope.index) for scope in self._scopes.values()) == len(self._owner_of)


def _common_run(places: Sequence[Place], most: int) -> list[int]:
    """Returns the tokens that all of these places have in common, at most so many, up to where a run branches off."""
    if len({node.tokens[position] for node, position in places}) > 1:
        return []
    first, *others = [node.run_from(position, most) for node, position in places]
    for run in others:
        length = min(len(first), len(run))
        if run[:length] != first[:length]:
            length = next(at for at in range(length) if run[at] != first[at])
        del first[length:]
    return first


def _vote(places: Sequence[Place]) -> tuple[int, float]:
    """Returns the token that most texts have at these places, of equals the newest one's, and the share of these."""
    votes: dict[int, int] = {}
    for node, position in places:
        token = node.tokens[position]
        votes[token] = votes.get(token, 0) + node.num_texts_at(position)
    token = max(votes, key=votes.__getitem__)
    return token, votes[token] / sum(votes.values())


def _scope_key(branch: Branch) -> ScopeKey:
    return branch.request.owner, branch.extra_keys.encoded
