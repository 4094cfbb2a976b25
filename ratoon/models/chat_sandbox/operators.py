"""Operators on values of a template, checked for size before they run.

`guard_…` functions are filters that syntax.py weaves into a template; each gets the render's context first, which also
keeps Jinja from running it at compile time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import Context

from ratoon.models.chat_sandbox.limits import (
    CONTAINERS,
    MAX_ENTRIES,
    MAX_FORMAT_DIGITS,
    MAX_INTEGER_BITS,
    MAX_SMALL_CHARACTERS,
    SHORT_TEXT,
    LimitReached,
    current_budget,
    measure,
)

CONTAINERS_AND_TEXT: tuple[type[Collection[Any]], ...] = (str, *CONTAINERS)
CHEAP_TEXT = 64 * 1024  # walking a text of this length takes microseconds
LONG_NUMBER = re.compile(rf"\d{{{MAX_FORMAT_DIGITS + 1},}}")
WIDTH_TOO_LONG = re.compile(rf"[%)][-#0 +]*\d*\.?{LONG_NUMBER.pattern}")
WIDTH_FROM_VALUE = re.compile(r"%[-#0 +]*(\d*\.)?\*")


def add(left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        current_budget().make_text(len(left) + len(right))
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        current_budget().make_entries(len(left) + len(right))
    return check_number(left + right)


def subtract(left: Any, right: Any) -> Any:
    return check_number(left - right)


def multiply(left: Any, right: Any) -> Any:
    for many, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(many, str):
            current_budget().make_text(len(many) * max(0, times))
        elif isinstance(times, int) and isinstance(many, (list, tuple)):
            current_budget().make_entries(len(many) * max(0, times))
    return check_number(left * right)


def power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > 2 * MAX_INTEGER_BITS:
        raise too_large_number()
    return check_number(base**exponent)


def modulo(left: Any, right: Any) -> Any:
    return format_percent(left, right) if isinstance(left, str) else left % right


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": add,
    "-": subtract,
    "*": multiply,
    "**": power,
    "%": modulo,
}


def check_number(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise too_large_number()
    return value


def too_large_number() -> LimitReached:
    return LimitReached(f"makes a number of more than {MAX_INTEGER_BITS} bits")


def format_percent(form: str, values: Any) -> str:
    check_format(form)
    if WIDTH_TOO_LONG.search(form) or WIDTH_FROM_VALUE.search(form):
        raise too_wide()
    fields = form.count("%")
    width = max(map(int, re.findall(rf"\d{{1,{MAX_FORMAT_DIGITS}}}", form)), default=0)
    # A tuple's values are used once each, those of a mapping as often as the format likes.
    uses = 1 if isinstance(values, tuple) else fields
    current_budget().make_text(len(form) + fields * width + uses * measure(values).characters)
    return form % values


def check_format(form: str) -> None:
    if len(form) > MAX_SMALL_CHARACTERS:
        raise LimitReached(f"formats a text of more than {MAX_SMALL_CHARACTERS} characters")


def too_wide() -> LimitReached:
    return LimitReached(f"formats with a width of more than {MAX_FORMAT_DIGITS} digits")


def collect(values: Iterable[Any]) -> list[Any]:
    """The list of them, unless it gets too long."""
    items = list(islice(values, MAX_ENTRIES + 1))
    current_budget().make_entries(len(items))
    return items


def to_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, CONTAINERS):
        measure(value)
    return str(value)


def concatenate(pieces: Iterable[str]) -> str:
    """What Jinja makes of the body of a macro or a block."""
    pieces = list(pieces)
    current_budget().make_text(sum(map(len, pieces)))
    return "".join(pieces)


@pass_context
def guard_tick(context: Context, cost: int) -> bool:
    budget = current_budget()  # RenderBudget.step, without another call: this runs for every message
    budget.steps += cost
    if budget.steps > budget.next_look:
        budget.look_at_clock()
    return True


@pass_context
def guard_add(context: Context, *terms: Any) -> Any:
    """A chain of `+`: nearly always texts, which are joined at once."""
    try:
        if sum(map(len, terms)) <= SHORT_TEXT:
            return "".join(terms)
    except TypeError:
        pass  # not all of them are texts
    total = terms[0]
    for term in terms[1:]:
        total = add(total, term)
    return total


@pass_context
def guard_concat(context: Context, *values: Any) -> str:
    return concatenate(map(to_text, values))


@pass_context
def guard_slice(context: Context, value: Any, start: Any, stop: Any, step: Any) -> Any:
    cut = slice(start, stop, step)
    if isinstance(value, (str, list, tuple)):
        length = len(range(*cut.indices(len(value))))
        budget = current_budget()
        budget.make_text(length) if isinstance(value, str) else budget.make_entries(length)
    return value[cut]


@pass_context
def guard_key(context: Context, value: Any) -> Any:
    if isinstance(value, tuple):
        measure(value)
    return value


@pass_context
def guard_operand(context: Context, value: Any) -> Any:
    """Of a comparison with anything."""
    if isinstance(value, str):
        if len(value) > CHEAP_TEXT:
            current_budget().look_at_clock()
    elif isinstance(value, CONTAINERS):
        measure(value)
    return value


@pass_context
def guard_haystack(context: Context, value: Any) -> Any:
    """In which a constant is looked for: entries are not walked."""
    if isinstance(value, CONTAINERS_AND_TEXT) and len(value) > CHEAP_TEXT:
        current_budget().look_at_clock()
    return value


@pass_context
def guard_literal(context: Context, value: Any) -> Any:
    """A list, tuple or dict that the template writes down. Short texts come to account here, where they are kept."""
    budget = current_budget()
    entries = value.values() if isinstance(value, dict) else value
    budget.charge(sum(len(entry) for entry in entries if type(entry) is str))
    budget.make_entries(len(value))
    return value


@pass_context
def guard_arguments(context: Context, value: Any) -> list[Any]:
    return collect(value)


@pass_context
def guard_output(context: Context, value: Any) -> str:
    """Whatever the template prints."""
    return to_text(value)


GUARDS: dict[str, Callable[..., Any]] = {
    "guard tick": guard_tick,
    "guard add": guard_add,
    "guard concat": guard_concat,
    "guard slice": guard_slice,
    "guard key": guard_key,
    "guard operand": guard_operand,
    "guard haystack": guard_haystack,
    "guard literal": guard_literal,
    "guard arguments": guard_arguments,
    "guard output": guard_output,
}


def guarded_test(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test (`is eq`, `is in`, …) that may walk its operands."""

    @pass_context
    def guarded(context: Context, *operands: Any) -> Any:
        for operand in operands:
            guard_operand(context, operand)
        return test(*operands)

    return guarded


WALKING_TESTS = (
    *("==", "!=", "<", ">", "<=", ">=", "eq", "equalto", "ne", "lt", "lessthan", "le", "gt", "greaterthan", "ge"),
    *("in", "lower", "upper"),
)
