"""Types that msgspec may be given in any thread."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

Type = TypeVar("Type")

_one_at_a_time = threading.RLock()
_known: set[Any] = set()


def prepared(kind: Type) -> Type:
    """Returns the type itself, once msgspec knows all of it.

    msgspec fills what it knows of a class when the class is first used, and runs Python code meanwhile. A second thread
    that uses the class then reads a part that is not there yet, and the process ends (msgspec 0.22). So every type that
    goes to msgspec passes through here, where one thread at a time fills it."""
    if kind not in _known:
        with _one_at_a_time:
            msgspec.msgpack.Decoder(kind)
            _known.add(kind)
    return kind
