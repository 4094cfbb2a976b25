"""What to say about a path or a method that the server does not have."""

from __future__ import annotations

from collections.abc import Iterable

from ratoon.api.server.auth import is_admin_path
from ratoon.core.suggestions import nearest_name

VERSION = "/v1"
MAX_SHOWN = 100


def no_such_path(path: str, known: Iterable[str]) -> str:
    """`known` are the paths of the server's routes."""
    paths = set(known)
    message = f"There is no {path[:MAX_SHOWN]!r} here"
    if is_admin_path(path) and not any(is_admin_path(one) for one in paths):
        return f"{message}: administration is off; ratoon serve --admin turns it on, with a key of its own"
    meant = _meant(path, paths)
    return message if meant is None else f"{message}; did you mean {meant}?"


def _meant(path: str, paths: set[str]) -> str | None:
    plain = path.rstrip("/")
    for candidate in (plain, VERSION + plain, plain.removeprefix(VERSION)):  # a base URL without /v1, or with it twice
        if candidate in paths and candidate != path:
            return candidate
    return nearest_name(plain, paths)
