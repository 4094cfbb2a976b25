"""What images and videos became, so that one that comes again is not decoded, resized, cut and hashed again.

Entries are found by a hash of what was given and of the options of its preprocessing, and belong to one model. They
hold no more than so many bytes; the one that was used longest ago goes first. What several threads ask for at once is
prepared by one of them. Requests share an entry's pixels, which are not copied.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from ratoon.core.wire import Buffer
from ratoon.media.families.base import Preprocessed

MAX_BYTES = 256 * 2**20  # of a model's front end


def key_of(modality: str, options: Mapping[str, Any], facts: Sequence[Any], parts: Sequence[Buffer]) -> bytes:
    """`parts` are a file's bytes, or pixels; `facts` say what these mean: their shapes, or frames in a second."""
    sizes = [memoryview(part).nbytes for part in parts]
    digest = sha256(msgspec.json.encode((modality, options, facts, sizes), order="deterministic"))
    for part in parts:
        digest.update(part)
    return digest.digest()


class PreparedMedia:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[bytes, Preprocessed] = OrderedDict()
        self._under_way: dict[bytes, threading.Event] = {}  # set when it is there, or has failed
        self._lock = threading.Lock()

    def get(self, key: bytes, prepare: Callable[[], Preprocessed]) -> Preprocessed:
        """What is kept under the key, or else what `prepare` makes, which is kept then. Waits while another thread
        prepares the same. Errors of `prepare` are its own caller's: they name a field of its request."""
        while True:
            with self._lock:
                found = self._kept.get(key)
                if found is not None:
                    self._kept.move_to_end(key)
                    return found
                others = self._under_way.get(key)
                if others is None:
                    done = self._under_way[key] = threading.Event()
                    break
            others.wait()
        try:
            made = prepare()
            self._keep(key, made)
            return made
        finally:
            with self._lock:
                del self._under_way[key]
            done.set()

    def _keep(self, key: bytes, made: Preprocessed) -> None:
        with self._lock:
            if _bytes_of(made) > self._max_bytes:
                return
            self._kept[key] = made
            self._num_bytes += _bytes_of(made)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _bytes_of(self._kept.popitem(last=False)[1])


def _bytes_of(made: Preprocessed) -> int:
    return sum(one.features.data.nbytes for one in made.inputs)
