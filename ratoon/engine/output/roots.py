"""Requests that have ended, as roots: the tokens of each choice, by the caller's id, so that they can be continued.

Bounded in number and in bytes: the least recently used one of the owner that has most of them is evicted.
Kept in the front end, so that a root outlives the engine process; whether its keys and values are
still in memory is the engine's state. With a log, roots outlive the front end as well.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ratoon.core.adapters import Adapter
from ratoon.core.config import MAX_ROOTS
from ratoon.core.encoder import EncoderInput
from ratoon.core.errors import RequestError, UnknownParentError
from ratoon.core.kv import IN_MEMORY
from ratoon.core.media import MediaFeature, RopePositions, cut_features, feature_around
from ratoon.core.request import EndedLease, branch_id_of
from ratoon.core.structured import StructuredOutput
from ratoon.core.wire import Decoder, WireError, encode
from ratoon.engine.output.record_log import RecordLog

MAX_FEATURE_BYTES = 256 * 2**20  # of audio features and media of all roots together; tokens are few beside them
MAX_LOGGED_FEATURE_BYTES = 8 * 2**20  # of a root that is written: the event loop waits for it
SPARE_RECORDS = 1000  # of roots that are gone, and as many as there are roots: with more, the log is written anew


@dataclass(slots=True)
class Root:
    request_id: str  # the caller's
    internal_id: str
    prompt_token_ids: list[int]
    choices: list[list[int]]  # tokens that each generated
    cache_salt: str | None = None
    adapter: Adapter | None = None
    owner: str | None = None  # only the same owner may continue it
    engine: int | None = None  # where it ran
    leased_until: float | None = None  # wall-clock time until which it was asked to keep its memory
    searching: bool = False  # a beam search that still runs: its choices are not known yet
    ended_at: float = field(default_factory=time.time)  # wall-clock time
    encoder_input: EncoderInput | None = None  # what its encoder read; the prompt is then the decoder's
    structured_output: StructuredOutput | None = None  # what its text had to match; `first_token` is where that begins
    mm_features: list[MediaFeature] = field(default_factory=list)  # images and other media of its prompt
    rope: RopePositions | None = None  # that go with them
    session: str | None = None  # that its texts ended in
    retention: str | None = None  # where its blocks are kept

    @property
    def session_of_continuations(self) -> str:
        """The session of a continuation that names none: without one of the parent's, it is that of all its
        continuations."""
        return f"continuations of {self.internal_id}" if self.session is None else self.session

    @property
    def leased(self) -> bool:
        """Whether its memory may be leased still. Leases may also end before their time."""
        return self.leased_until is not None and self.leased_until > time.time()

    def leases(self) -> list[EndedLease]:
        """Returns the leases of its choices, for an engine that is started again."""
        if not self.leased or self.leased_until is None:
            return []
        # Blocks before the first image are hashed by their tokens alone, and the last token is never computed
        num_tokens = min((feature.offset + 1 for feature in self.mm_features), default=None)
        return [
            EndedLease(
                self.branch_id(choice),
                self.request_id,
                self.owner,
                self.leased_until - time.time(),
                self.tokens(choice)[:num_tokens],
                None if self.adapter is None else self.adapter.digest,
                self.cache_salt,
                None if self.encoder_input is None else self.encoder_input.content_hash.hex(),
            )
            for choice in range(len(self.choices))
        ]

    @property
    def feature_bytes(self) -> int:
        features = None if self.encoder_input is None else self.encoder_input.features
        num_bytes = 0 if features is None else features.data.nbytes
        if self.mm_features:  # an image may stand in several places
            inputs = {feature.content_hash: feature.data.features for feature in self.mm_features}
            num_bytes += sum(pixels.data.nbytes for pixels in inputs.values())
        return num_bytes

    def branch_id(self, choice: int) -> str:
        """What the engine calls this choice."""
        return branch_id_of(self.internal_id, choice)

    @property
    def branch_ids(self) -> list[str]:
        return [self.branch_id(choice) for choice in range(len(self.choices))]

    def tokens(self, choice: int, at: int | None = None, field: str = "continuation_of") -> list[int]:
        """The choice's sequence, prompt and answer, up to `at` tokens of it. `field` is where the root was named."""
        if self.searching:
            raise RequestError(field, "is a beam search that has not ended", "wait for its end")
        self.verify_choice(choice)
        token_ids = self.prompt_token_ids + self.choices[choice]
        if at is None:
            return token_ids
        if isinstance(at, bool) or not isinstance(at, int) or not 1 <= at <= len(token_ids):
            raise RequestError("at", f"{at!r} is not a position in the parent", f"1 to {len(token_ids)} tokens")
        return token_ids[:at]

    def media_at(self, num_tokens: int, whole_images: bool, field: str = "at") -> list[MediaFeature]:
        """Returns the media of the first `num_tokens` of the sequence. `whole_images`: rows of an image see each other
        in both directions, so that none can be cut."""
        image = feature_around(self.mm_features, num_tokens) if whole_images else None
        if image is not None:
            end = image.offset + image.length
            problem = f"{num_tokens} tokens end within an image, whose rows see each other in both directions"
            raise RequestError(field, problem, f"{image.offset}, before it, or {end}, behind it")
        return cut_features(self.mm_features, num_tokens)

    def structured_output_at(self, num_tokens: int) -> StructuredOutput:
        """Returns the structured output of a continuation that goes on with the grammar after so many tokens of the
        sequence."""
        asked, field = self.structured_output, "structured_output.continue_grammar"
        if asked is None or asked.first_token is None:
            raise RequestError(field, "the parent has no structured output", "a schema or grammar of its own")
        if num_tokens < asked.first_token:
            problem = f"the parent's structured output begins after {asked.first_token} tokens"
            raise RequestError(field, problem, "a later place in the parent (`at`)")
        return asked

    def verify_choice(self, choice: int) -> None:
        if isinstance(choice, bool) or not isinstance(choice, int) or not 0 <= choice < len(self.choices):
            raise RequestError("choice", f"{choice!r} is not one of the parent's", f"0 to {len(self.choices) - 1}")


@dataclass(slots=True)
class _OwnersRoots:
    roots: OrderedDict[str, Root] = field(default_factory=OrderedDict)  # by id; least recently used first
    feature_bytes: int = 0


class RootRecord(msgspec.Struct):
    """What a log says of a root: that it is there, or that it is gone."""

    owner: str | None
    request_id: str
    root: Root | None


class RootLog:
    """The roots of one table, in a file."""

    def __init__(self, records: RecordLog) -> None:
        self._records = records
        self._decoder: Decoder[RootRecord] = Decoder(RootRecord)
        self._num_records = 0

    def read(self) -> list[Root]:
        """Returns the roots that are there, in the order in which they ended."""
        found: dict[tuple[str | None, str], Root] = {}
        for frames in self._records.read():
            try:
                record = self._decoder.decode(frames)
            except WireError:  # of another version
                continue
            found.pop((record.owner, record.request_id), None)
            if record.root is not None:
                record.root.engine = None  # engines are others now
                found[record.owner, record.request_id] = record.root
        self.write_anew(found.values())
        return list(found.values())

    def add(self, root: Root) -> None:
        is_small = root.feature_bytes <= MAX_LOGGED_FEATURE_BYTES
        if is_small and not root.searching and root.retention != IN_MEMORY:
            self._append(RootRecord(root.owner, root.request_id, root))

    def drop(self, root: Root) -> None:
        self._append(RootRecord(root.owner, root.request_id, None))

    def close(self) -> None:
        self._records.close()

    def has_many_outdated(self, num_roots: int) -> bool:
        return self._num_records > 2 * num_roots + SPARE_RECORDS

    def write_anew(self, roots: Iterable[Root]) -> None:
        kept = [RootRecord(root.owner, root.request_id, root) for root in roots if root.retention != IN_MEMORY]
        self._records.replace(map(encode, kept))
        self._num_records = len(kept)

    def _append(self, record: RootRecord) -> None:
        self._num_records += 1
        self._records.append(encode(record))


class RootTable:
    def __init__(
        self,
        max_roots: int = MAX_ROOTS,
        max_feature_bytes: int = MAX_FEATURE_BYTES,
        *,
        notes_dropped: bool = False,
        log: RootLog | None = None,
    ) -> None:
        """`notes_dropped`: engines keep texts of roots, and are told which roots are gone (`take_dropped`). `log` has
        the roots of an earlier process, and gets those of this one."""
        self._max_roots = max_roots
        self._notes_dropped = notes_dropped
        self._dropped: list[str] = []  # branches of roots that are gone, since they were last taken
        self._max_feature_bytes = max_feature_bytes
        self._feature_bytes = 0  # of all that are here
        self._num_roots = 0
        # Ids are separate per owner.
        self._by_owner: dict[str | None, _OwnersRoots] = {}
        self._log: RootLog | None = None  # while roots are read from it, nothing is written to it
        if log is not None:
            for root in log.read():
                self.add(root)
            self._log = log

    def __len__(self) -> int:
        return self._num_roots

    def add(self, root: Root) -> None:
        own = self._by_owner.setdefault(root.owner, _OwnersRoots())
        if root.request_id in own.roots:
            self._drop(own, root.request_id)
        own.roots[root.request_id] = root
        own.feature_bytes += root.feature_bytes
        self._by_owner[root.owner] = own
        self._num_roots += 1
        self._feature_bytes += root.feature_bytes
        if self._log is not None:
            self._log.add(root)
        while self._num_roots > self._max_roots:
            self._drop_oldest(max(self._by_owner.values(), key=lambda held: len(held.roots)))
        while self._feature_bytes > self._max_feature_bytes:
            self._drop_oldest(max(self._by_owner.values(), key=lambda held: held.feature_bytes))

    def leases_to_restore(self) -> list[Any]:
        """Returns the leases of an earlier process that are not over, encoded for the engine's `restore_leases`: those
        of the newest roots first."""
        roots = [root for held in self._by_owner.values() for root in held.roots.values() if root.leased]
        roots.sort(key=lambda root: root.ended_at, reverse=True)
        return [msgspec.to_builtins(lease) for root in roots for lease in root.leases()]

    def note_restored(self, branch_ids: Iterable[str]) -> None:
        """An engine was started again, and these leases of earlier processes go on; others do not."""
        restored = set(branch_ids)
        for held in self._by_owner.values():
            for root in held.roots.values():
                if root.leased and restored.isdisjoint(root.branch_ids):
                    root.leased_until = None

    def close(self) -> None:
        """Another process may have the log now."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def note_end(self, owner: str | None, external_id: str, request_id: str, root: Root | None) -> None:
        """A request has ended. `root`: what can be continued of it, if anything."""
        if root is not None:
            self.add(root)

    def note_dropped(self, branch_ids: Iterable[str]) -> None:
        """These branches are those of no root."""
        if self._notes_dropped:
            self._dropped += branch_ids

    def take_dropped(self) -> list[str]:
        """Returns the branches of roots that are gone, each once: they were evicted, replaced or removed."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def find(self, request_id: str, owner: str | None = None) -> Root:
        """UnknownParentError, the same for an unknown id and for one of another owner."""
        own = self._by_owner.get(owner)
        root = own.roots.get(request_id) if own is not None and isinstance(request_id, str) else None
        if root is None:
            raise UnknownParentError(
                "continuation_of", f"there is no request {request_id!r} to continue", "the id of one that has ended"
            )
        assert own is not None
        own.roots.move_to_end(request_id)
        return root

    def remove(self, request_id: str, owner: str | None = None) -> Root:
        self.find(request_id, owner)
        return self._drop(self._by_owner[owner], request_id)

    def _drop_oldest(self, own: _OwnersRoots) -> None:
        self._drop(own, next(iter(own.roots)))

    def _drop(self, own: _OwnersRoots, request_id: str) -> Root:
        root = own.roots.pop(request_id)
        own.feature_bytes -= root.feature_bytes
        self._num_roots -= 1
        self._feature_bytes -= root.feature_bytes
        if not own.roots:
            del self._by_owner[root.owner]
        self.note_dropped(root.branch_ids)
        if self._log is not None:
            self._log.drop(root)
            if self._log.has_many_outdated(self._num_roots):
                self._log.write_anew(one for held in self._by_owner.values() for one in held.roots.values())
        return root

    def list(self, owner: str | None = None) -> list[Root]:
        """Returns this owner's roots, the newest first."""
        own = self._by_owner.get(owner)
        roots = () if own is None else own.roots.values()
        return sorted(roots, key=lambda root: root.ended_at, reverse=True)
