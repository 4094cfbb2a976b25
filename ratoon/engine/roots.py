"""Requests that have ended, as roots: the tokens of each choice, by the caller's id, so that they can be continued.

Bounded in number and in bytes: the ones that nobody asked for longest are forgotten. Kept on this side of the engine,
so that a root outlives the process that computed it; whether its keys and values are still there, the engine knows.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from ratoon.core.encoder import EncoderInput
from ratoon.core.errors import RequestError, UnknownParentError

MAX_ROOTS = 1024
MAX_FEATURE_BYTES = 256 * 2**20  # of the audio features of all roots together; tokens are few beside them


@dataclass(slots=True)
class Root:
    request_id: str  # the caller's
    internal_id: str
    prompt_token_ids: list[int]
    choices: list[list[int]]  # tokens that each generated
    cache_salt: str | None = None
    adapter: str | None = None
    owner: str | None = None  # whose it is; nobody else may continue it
    engine: int | None = None  # where it ran
    leased: bool = False  # whether it was asked to keep its memory
    searching: bool = False  # a beam search that still runs: what its choices will be is not known yet
    ended_at: float = field(default_factory=time.time)  # on the wall's clock
    encoder_input: EncoderInput | None = None  # what its encoder read; the prompt is then the decoder's

    @property
    def feature_bytes(self) -> int:
        features = None if self.encoder_input is None else self.encoder_input.features
        return 0 if features is None else features.data.nbytes

    def branch_id(self, choice: int) -> str:
        """What the engine calls this choice."""
        return self.internal_id if choice == 0 else f"{self.internal_id}#{choice}"

    def tokens(self, choice: int, at: int | None = None, field: str = "continuation_of") -> list[int]:
        """The choice's sequence, prompt and answer, up to `at` tokens of it. `field` is where the root was named."""
        if self.searching:
            raise RequestError(field, "is a beam search that has not ended", "wait for its end")
        self.verify_choice(choice)
        token_ids = self.prompt_token_ids + self.choices[choice]
        if at is None:
            return token_ids
        if isinstance(at, bool) or not isinstance(at, int) or not 1 <= at <= len(token_ids):
            raise RequestError("at", f"{at!r} is no place in the parent", f"1 to {len(token_ids)} tokens")
        return token_ids[:at]

    def verify_choice(self, choice: int) -> None:
        if isinstance(choice, bool) or not isinstance(choice, int) or not 0 <= choice < len(self.choices):
            raise RequestError("choice", f"{choice!r} is not one of the parent's", f"0 to {len(self.choices) - 1}")


class RootTable:
    def __init__(self, max_roots: int = MAX_ROOTS, max_feature_bytes: int = MAX_FEATURE_BYTES) -> None:
        self._max_roots = max_roots
        self._max_feature_bytes = max_feature_bytes
        self._feature_bytes = 0  # of all that are here
        # By owner and id: an id that one owner chose is not taken from, or told to, another.
        self._roots: OrderedDict[tuple[str | None, str], Root] = OrderedDict()

    def __len__(self) -> int:
        return len(self._roots)

    def add(self, root: Root) -> None:
        key = (root.owner, root.request_id)
        if key in self._roots:
            self._drop(key)
        self._roots[key] = root
        self._feature_bytes += root.feature_bytes
        while len(self._roots) > self._max_roots or self._feature_bytes > self._max_feature_bytes:
            self._drop(next(iter(self._roots)))

    def find(self, request_id: str, owner: str | None = None) -> Root:
        """UnknownParentError, the same for an id that never was and for one that is somebody else's."""
        root = self._roots.get((owner, request_id)) if isinstance(request_id, str) else None
        if root is None:
            raise UnknownParentError(
                "continuation_of", f"there is no request {request_id!r} to continue", "the id of one that has ended"
            )
        self._roots.move_to_end((owner, request_id))
        return root

    def remove(self, request_id: str, owner: str | None = None) -> Root:
        self.find(request_id, owner)
        return self._drop((owner, request_id))

    def _drop(self, key: tuple[str | None, str]) -> Root:
        root = self._roots.pop(key)
        self._feature_bytes -= root.feature_bytes
        return root

    def list(self, owner: str | None = None) -> list[Root]:
        """This owner's, the newest first."""
        own = (root for root in self._roots.values() if root.owner == owner)
        return sorted(own, key=lambda root: root.ended_at, reverse=True)
