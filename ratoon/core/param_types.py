"""Checks the types of the values that params are constructed with, so that an error is where the value was written.
Ranges, and what depends on the model, are checked when a request is made."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from ratoon.core.errors import RequestError
from ratoon.core.suggestions import ParamsMeta

MAX_SHOWN = 60  # characters of a value


class Kind(NamedTuple):
    accepts: Callable[[Any], bool]
    expected: str


ANYTHING = Kind(lambda value: True, "")
# bool is a subclass of int, and is no number here.
SIMPLE = {
    int: Kind(lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    float: Kind(lambda value: isinstance(value, (int, float)) and not isinstance(value, bool), "a number"),
    bool: Kind(lambda value: isinstance(value, bool), "true or false"),
    str: Kind(lambda value: isinstance(value, str), "text"),
    types.NoneType: Kind(lambda value: value is None, "None"),
}
LISTS = {int: "whole numbers", float: "numbers", str: "texts", list: "lists"}


class TypedParamsMeta(ParamsMeta):
    """Reports a value of a wrong type as well."""

    if not TYPE_CHECKING:  # it would hide the fields from type checkers

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            params = super().__call__(*args, **fields)
            verify_types(cls, fields)
            return params


def verify_types(params: type, values: Mapping[str, Any]) -> None:
    """RequestError, naming the field, for the first value of a wrong type."""
    kinds = _kinds_of(params)
    for name, value in values.items():
        kind = kinds[name]
        if not kind.accepts(value):
            shown = repr(value)
            shown = shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "…"
            is_switch = kind.expected == SIMPLE[bool].expected
            problem = f"{shown} is neither true nor false" if is_switch else f"{shown} is not {kind.expected}"
            raise RequestError(name, problem, kind.expected)


@cache
def _kinds_of(params: type) -> dict[str, Kind]:
    """Returns the type that each field takes. Types that a constructor converts are in ALSO_ACCEPTED of the class."""
    further: Mapping[str, tuple[Any, ...]] = getattr(params, "ALSO_ACCEPTED", {})
    hints = get_type_hints(params)
    fields: tuple[str, ...] = params.__struct_fields__  # type: ignore[attr-defined]
    return {name: _any_of([_kind(hints[name]), *map(_kind, further.get(name, ()))]) for name in fields}


def _kind(hint: Any) -> Kind:
    if hint is Any:
        return ANYTHING
    if hint in SIMPLE:
        return SIMPLE[hint]
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _any_of([_kind(member) for member in members])
    if origin is Literal:
        return Kind(lambda value: value in members, " or ".join(map(repr, members)))
    if origin is list:
        return _list_of(get_origin(members[0]) or members[0])
    if origin is dict or hint is dict:
        return Kind(lambda value: isinstance(value, Mapping), "a mapping")
    if isinstance(hint, type):
        return Kind(lambda value: isinstance(value, hint), f"a {hint.__name__}")
    return ANYTHING


def _list_of(entry: type) -> Kind:
    def accepts(value: Any) -> bool:
        if not isinstance(value, (list, tuple)):
            return False
        found = set(map(type, value))  # all at once: there may be very many
        if found <= {entry}:
            return True
        return bool not in found and all(isinstance(one, entry) for one in value)

    return Kind(accepts, f"a list of {LISTS.get(entry, entry.__name__)}")


def _any_of(kinds: list[Kind]) -> Kind:
    if len(kinds) == 1 or ANYTHING in kinds:
        return ANYTHING if ANYTHING in kinds else kinds[0]
    expected = [kind.expected for kind in kinds if kind.expected != "None"]
    accepting = tuple(kind.accepts for kind in kinds)
    return Kind(lambda value: any(accepts(value) for accepts in accepting), " or ".join(expected))
