"""Suggestions for mistyped names. Only near misses: a wrong suggestion is worse than none.

The measure is the number of typing errors, not the share of equal letters: "min_tokens" is not near "max_tokens".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

LONGEST_NAME = 64  # longer names get no suggestion


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs by a typing error or two, the nearest first; None if there is none."""
    typed = _plain(name)
    if not typed or len(name) > LONGEST_NAME:
        return None
    allowed = 1 if len(typed) < 12 else 2
    best: tuple[int, str] | None = None
    for candidate in known:
        distance = _typing_errors(typed, _plain(candidate), allowed)
        if distance <= allowed and (best is None or distance < best[0]):
            best = (distance, candidate)
    # All names of one or two letters are one typing error apart.
    return None if best is None or (len(typed) < 3 and best[0] > 0) else best[1]


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A question for the end of an error message, or `otherwise` where nothing is near."""
    near = nearest_name(name, known)
    return otherwise if near is None else f"did you mean {near}?"


def unknown_keyword(of: str, name: str, known: Iterable[str]) -> TypeError:
    """The TypeError for an unknown keyword, with a suggestion."""
    meant = did_you_mean(name, known)
    return TypeError(f"{of} has no {name!r}" + (f"; {meant}" if meant else ""))


if TYPE_CHECKING:
    from msgspec import StructMeta
else:
    StructMeta = type(msgspec.Struct)  # which older versions do not name


class ParamsMeta(StructMeta):
    """Reports an unknown keyword with a suggestion. Runs only when a caller constructs the params, not when they are
    decoded from the wire or copied."""

    if not TYPE_CHECKING:  # it would hide the fields from type checkers

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            known = cls.__struct_fields__
            for name in fields:
                if name not in known:
                    raise unknown_keyword(cls.__name__, name, known)
            return super().__call__(*args, **fields)


def _plain(name: str) -> str:
    """maxTokens, max-tokens and max_tokens are the same."""
    return name.lower().replace("_", "").replace("-", "")


def _typing_errors(left: str, right: str, allowed: int) -> int:
    """Letters that are wrong, missing or too many, and neighbours that changed places; if above `allowed`, any number
    above it."""
    if abs(len(left) - len(right)) > allowed:
        return allowed + 1
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, letter in enumerate(left, 1):
        above_before, before, row = before, row, [i]
        for j, other in enumerate(right, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == right[j - 2] and left[i - 2] == other:
                cost = min(cost, above_before[j - 2] + 1)
            row.append(cost)
    return row[-1]
