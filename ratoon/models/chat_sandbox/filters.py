"""The filters of a template, each with the checks that it needs.

Most are Jinja's own behind a guard; those that could make much out of little are done here. What is not named here does
not exist in chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import pass_context
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.utils import _PassArg

from ratoon.models.chat_sandbox.limits import (
    CONTAINERS,
    MAX_ENTRIES,
    MAX_SMALL_CHARACTERS,
    SHORT_TEXT,
    LimitReached,
    current_budget,
    measure,
)
from ratoon.models.chat_sandbox.methods import LINE_BREAKS, check_search, join, replace
from ratoon.models.chat_sandbox.operators import add, check_number, collect, format_percent, to_text

Filter = Callable[..., Any]

# Their cost and their result are about as large as their input, or they are lazy.
DIRECT = ("abs", "count", "d", "default", "first", "float", "int", "items", "last", "length", "random", "reverse")
# They use what they get beside the value as a name or as a key.
BY_NAME = ("attr", "map", "reject", "rejectattr", "select", "selectattr")
# They print what they get, and then take time in proportion to that text.
TEXTUAL = ("capitalize", "e", "escape", "forceescape", "lower", "truncate", "upper")
# They compare or hash what is in the values that they get.
WALKING = ("dictsort", "groupby", "max", "min", "slice", "sort", "unique")
# They take more than linear time, or are slow.
SMALL = (
    *("filesizeformat", "pprint", "striptags", "title", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr"),
)
MAX_INDENT = 100
MAX_PRECISION = 300


def guarded_filters() -> dict[str, Filter]:
    filters = {name: pass_context(filter) for name, filter in OWN.items()}
    for names, check in (
        (DIRECT, _no_check),
        (BY_NAME, _check_names),
        (TEXTUAL, _print),
        (WALKING, _collect_and_measure),
        (SMALL, _check_small),
    ):
        filters.update({name: _guarded(name, check) for name in names})
    return filters


def _guarded(name: str, check: Callable[[Any, tuple[Any, ...]], Any]) -> Filter:
    """Jinja's filter of this name, which gets the value that `check` returns."""

    @pass_context
    def guarded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        current_budget().step()
        value = check(value, (*args, *kwargs.values()))
        return _account(_call_original(name, context, value, *args, **kwargs))

    return guarded


def _call_original(name: str, context: Context, *args: Any, **kwargs: Any) -> Any:
    original = FILTERS[name]
    wanted = _PassArg.from_obj(original)
    if wanted is None:
        return original(*args, **kwargs)
    places = {
        _PassArg.context: context,
        _PassArg.eval_context: context.eval_ctx,
        _PassArg.environment: context.environment,
    }
    return original(places[wanted], *args, **kwargs)


def _no_check(value: Any, options: tuple[Any, ...]) -> Any:
    return value


def _check_names(value: Any, options: tuple[Any, ...]) -> Any:
    for option in options:
        if isinstance(option, tuple) or (isinstance(option, str) and len(option) > SHORT_TEXT):
            _check_small(option, ())
    return value


def _print(value: Any, options: tuple[Any, ...]) -> str:
    return to_text(value)


def _collect_and_measure(value: Any, options: tuple[Any, ...]) -> Any:
    if not isinstance(value, CONTAINERS):
        value = collect(value)
    measure(value)
    return _check_names(value, options)


def _check_small(value: Any, options: tuple[Any, ...]) -> Any:
    extent = measure((value, options))
    if extent.characters + extent.nodes > MAX_SMALL_CHARACTERS:
        raise LimitReached(f"uses a slow filter on more than {MAX_SMALL_CHARACTERS} characters")
    return value


def _account(result: Any) -> Any:
    if isinstance(result, str):
        current_budget().make_text(len(result))
        return str(result)  # never Markup, whose operators escape
    if isinstance(result, CONTAINERS):
        current_budget().make_entries(len(result))
        return result
    return _ticking(result) if isinstance(result, Iterator) else check_number(result)


def _ticking(values: Iterator[Any]) -> Iterator[Any]:
    """The same values; each is a step, wherever they are taken out."""
    budget = current_budget()
    for value in values:
        if isinstance(value, list):
            budget.make_entries(len(value))
        budget.step()
        yield value


def make_batches(context: Context, value: Iterable[Any], linecount: int, fill_with: Any = None) -> Any:
    if linecount > MAX_ENTRIES:
        raise LimitReached(f"makes a list of more than {MAX_ENTRIES} entries")
    return _account(_call_original("batch", context, value, linecount, fill_with))


def center_text(context: Context, value: Any, width: int = 80) -> str:
    text = to_text(value)
    current_budget().make_text(max(width, len(text)))
    return text.center(width)


def format_values(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("can't handle positional and keyword arguments at the same time")
    return format_percent(to_text(value), kwargs or args)


def indent_lines(context: Context, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = to_text(s)
    by = len(width) if isinstance(width, str) else max(0, width)
    lines = sum(map(text.count, LINE_BREAKS))
    current_budget().make_entries(lines)
    current_budget().make_text((lines + 1) * by + len(text))
    return str(_call_original("indent", context, text, width, first, blank))


def join_values(context: Context, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = _map_attribute(context, value, attribute)
    return join(to_text(d).join, map(to_text, _ticking(iter(value))))


def _map_attribute(context: Context, values: Iterable[Any], attribute: str | int) -> Iterable[Any]:
    _check_names(values, (attribute,))
    mapped: Iterable[Any] = _call_original("map", context, values, attribute=attribute)
    return mapped


def replace_text(context: Context, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    return replace(to_text(s).replace, to_text(old), to_text(new), -1 if count is None else count)


def round_number(context: Context, value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > MAX_PRECISION:
        raise LimitReached(f"rounds to more than {MAX_PRECISION} digits")
    return check_number(_call_original("round", context, value, precision, method))


def add_up(context: Context, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    if attribute is not None:
        iterable = _map_attribute(context, iterable, attribute)
    for value in _ticking(iter(iterable)):
        start = add(start, value)
    return start


def to_string(context: Context, value: Any) -> str:
    return to_text(value)


def to_list(context: Context, value: Iterable[Any]) -> list[Any]:
    return collect(value)


def to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models have never seen."""
    extent = measure(value)
    inset = 0 if indent is None else indent if isinstance(indent, int) else len(indent)
    between = 4 if separators is None else sum(map(len, separators))
    if inset > MAX_INDENT or between > MAX_INDENT:
        raise LimitReached(f"indents JSON by more than {MAX_INDENT} characters")
    current_budget().make_text(extent.characters + extent.nodes * (max(0, inset) * extent.depth + between))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def trim_text(context: Context, value: Any, chars: str | None = None) -> str:
    text = to_text(value)
    if len(text) > SHORT_TEXT:
        check_search(text, chars or "")
        current_budget().make_text(len(text))
    return text.strip(chars)


OWN: dict[str, Filter] = {
    "batch": make_batches,
    "center": center_text,
    "format": format_values,
    "indent": indent_lines,
    "join": join_values,
    "list": to_list,
    "replace": replace_text,
    "round": round_number,
    "safe": to_string,  # nothing is escaped here, so nothing has to be marked as safe
    "string": to_string,
    "sum": add_up,
    "tojson": to_json,
    "trim": trim_text,
}
