"""The methods of texts, lists and dicts that a template may call, with a check where one call could take too much.

A method that is not named here is refused: new ones of a later Python are then no holes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import BuiltinMethodType, ModuleType
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter

from ratoon.models.chat_sandbox.limits import (
    CONTAINERS,
    MAX_ENTRIES,
    MAX_SEARCH_STEPS,
    MAX_TEXT_CHARACTERS,
    SHORT_TEXT,
    LimitReached,
    current_budget,
    measure,
)
from ratoon.models.chat_sandbox.operators import LONG_NUMBER, check_format, collect, too_wide

Method = Callable[..., Any]


def call_method(method: BuiltinMethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a built-in method, if it is one for templates."""
    owner, name = method.__self__, method.__name__
    for kind, methods in METHODS:
        if isinstance(owner, kind) and name in methods:
            guard = methods[name]
            if guard is None:
                return method(*args, **kwargs)
            return guard(method, *args, **kwargs)
    if isinstance(owner, ModuleType):  # a function that the caller passed on purpose
        return method(*args, **kwargs)
    raise SecurityError(f"{type(owner).__name__}.{name}() is not for templates")


def scan(method: Method, *args: Any) -> Any:
    if len(owner_of(method)) > SHORT_TEXT:
        current_budget().look_at_clock()
    return method(*args)


def whole(method: Method, *args: Any) -> Any:
    """The result is no longer than the text, or a few times so."""
    current_budget().make_text(len(owner_of(method)))
    return method(*args)


def naive_search(method: Method, *args: Any) -> Any:
    sought = args[0] if args and isinstance(args[0], str) else ""
    check_search(owner_of(method), sought)
    return whole(method, *args)


def check_search(text: str, sought: str) -> None:
    if len(text) * len(sought) > MAX_SEARCH_STEPS:
        raise LimitReached(f"searches {len(sought)} characters in {len(text)}")


def split(method: Method, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    check_search(owner_of(method), "" if sep is None or method.__name__ == "split" else sep)
    current_budget().make_text(len(owner_of(method)))
    return checked(method(sep, MAX_ENTRIES if maxsplit < 0 else min(maxsplit, MAX_ENTRIES)))


def splitlines(method: Method, keepends: bool = False) -> list[str]:
    text = owner_of(method)
    current_budget().make_text(len(text))
    if len(text) > MAX_ENTRIES:
        current_budget().make_entries(sum(map(text.count, LINE_BREAKS)))
    return checked(method(keepends))


def checked(entries: list[str]) -> list[str]:
    current_budget().make_entries(len(entries))
    return entries


def pad(method: Method, width: int, *fill: str) -> str:
    current_budget().make_text(max(len(owner_of(method)), width))
    return str(method(width, *fill))


def join(method: Method, values: Iterable[str]) -> str:
    items = collect(values)
    characters = sum(len(item) for item in items if isinstance(item, str))
    current_budget().make_text(characters + len(owner_of(method)) * len(items))
    return str(method(items))


def replace(method: Method, old: str, new: str, count: int = -1) -> str:
    text = owner_of(method)
    if isinstance(old, str) and isinstance(new, str):
        found = text.count(old)
        times = found if count < 0 else min(found, count)
        current_budget().make_text(len(text) + times * max(0, len(new) - len(old)))
    return str(method(old, new, count))


def look_up(method: Method, *args: Any) -> Any:
    """Compares or hashes its arguments, and in a list each entry with them."""
    owner = owner_of(method)
    measure(args)
    if not isinstance(owner, dict):
        measure(owner)
    return method(*args)


def copy(method: Method) -> Any:
    current_budget().make_entries(len(owner_of(method)))
    return method()


def owner_of(method: Method) -> Any:
    return method.__self__  # type: ignore[attr-defined]


def plain(*names: str) -> dict[str, Method | None]:
    return dict.fromkeys(names)


LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
SCAN = (
    *("count", "endswith", "find", "index", "startswith", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit"),
    *("isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper"),
)
WHOLE = ("capitalize", "casefold", "lower", "partition", "removeprefix", "removesuffix", "swapcase", "title", "upper")
NAIVE_SEARCH = ("lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip")

TEXT_METHODS: dict[str, Method | None] = {
    **dict.fromkeys(SCAN, scan),
    **dict.fromkeys(WHOLE, whole),
    **dict.fromkeys(NAIVE_SEARCH, naive_search),
    **dict.fromkeys(("split", "rsplit"), split),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), pad),
    "splitlines": splitlines,
    "join": join,
    "replace": replace,
}
METHODS: tuple[tuple[type, dict[str, Method | None]], ...] = (
    (str, TEXT_METHODS),
    (list, {"index": look_up, "count": look_up, "copy": copy}),
    (tuple, {"index": look_up, "count": look_up}),
    (dict, {**plain("items", "keys", "values"), "get": look_up, "copy": copy}),
    (range, plain("index", "count")),
)


class BoundedFormatter(SandboxedFormatter):
    """`str.format` with limits; one object for each call."""

    def __init__(self, environment: SandboxedEnvironment) -> None:
        super().__init__(environment)
        self.characters = 0

    def get_field(self, *args: Any) -> Any:
        found = super().get_field(*args)
        if isinstance(found[0], CONTAINERS):
            measure(found[0])
        return found

    def format_field(self, value: Any, spec: str) -> str:
        if LONG_NUMBER.search(spec):
            raise too_wide()
        text = str(super().format_field(value, spec))
        self.characters += len(text)
        if self.characters > MAX_TEXT_CHARACTERS:
            raise LimitReached(f"makes a text of more than {MAX_TEXT_CHARACTERS} characters")
        current_budget().make_text(len(text))
        return text


def bounded_format(environment: SandboxedEnvironment, method: Method) -> Method:
    """In the place of a text's `format` or `format_map`."""
    form, takes_mapping = owner_of(method), method.__name__ == "format_map"

    def format_text(*args: Any, **kwargs: Any) -> str:
        check_format(form)
        if takes_mapping:
            (kwargs,), args = args, ()
        return BoundedFormatter(environment).vformat(form, args, kwargs)

    return format_text
