"""What is wrong with a value, in words of our own: pydantic finds it, and speaks to programmers about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratoon.api.server.errors import ApiError, refused

PROBLEMS = {
    "missing": "is missing",
    "string_type": "is not text",
    "int_type": "is not a whole number",
    "int_parsing": "is not a whole number",  # from text, as forms have it
    "int_parsing_size": "is out of range",
    "int_from_float": "is not a whole number",
    "float_type": "is not a number",
    "float_parsing": "is not a number",
    "finite_number": "is not a finite number",
    "bool_type": "is neither true nor false",
    "bool_parsing": "is neither true nor false",
    "bytes_type": "is not a file",
    "list_type": "is not a list",
    "dict_type": "is not an object",
    "model_type": "is not an object",
    "model_attributes_type": "is not an object",
}
# With what the bound is, from the error's context.
RANGES = {
    "greater_than_equal": "is out of range; at least {ge}",
    "greater_than": "is out of range; more than {gt}",
    "less_than_equal": "is out of range; at most {le}",
    "less_than": "is out of range; less than {lt}",
    "string_too_short": "is too short; at least {min_length} characters",
    "string_too_long": "is too long; at most {max_length} characters",
    "too_short": "has too few entries; at least {min_length}",
    "too_long": "has too many entries; at most {max_length}",
    "literal_error": "is unknown; {expected}",
    "enum": "is unknown; {expected}",
}
OTHERWISE = "is not valid"


def explain(problem: Mapping[str, Any]) -> ApiError:
    """One of pydantic's errors, with its place."""
    path = _path(problem["loc"])
    context = problem.get("ctx", {})
    if isinstance(context.get("error"), ValueError):  # one of our own validators
        return refused(path, str(context["error"]))
    kind = problem["type"]
    if kind in RANGES:
        return refused(path, *RANGES[kind].format(**context).split("; ", 1))
    return refused(path, PROBLEMS.get(kind, OTHERWISE))


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or "body"
