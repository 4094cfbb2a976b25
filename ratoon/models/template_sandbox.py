"""Jinja's sandbox as chat templates expect it: only the helpers that Hugging Face provides.

It prevents a template from accessing anything else and from changing its input, and limits the size of input and
output. It does not limit time or memory: a template that comes with a request runs in template_process.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable

MAX_TEMPLATE_CHARACTERS = 256 * 1024
MAX_INPUT_CHARACTERS = 8 * 2**20  # of all texts that a template is given
MAX_INPUT_VALUES = 1_000_000
MAX_OUTPUT_CHARACTERS = 8 * 2**20
MAX_DATE_FORMAT = 256
ROLE = "role"


class LimitReached(Exception):
    """The template exceeds a limit, which the message names."""


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
    program: jinja2.Template
    read: frozenset[str]  # the variables, fields and keys that it names
    roles: frozenset[str]  # the texts that it compares a role with

    def render(self, variables: Mapping[str, Any]) -> str:
        pieces, length = [], 0
        for piece in self.program.generate(variables):
            length += len(piece)
            if length > MAX_OUTPUT_CHARACTERS:
                raise LimitReached(f"writes more than {MAX_OUTPUT_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)


@lru_cache(maxsize=32)
def compile_template(text: str) -> CompiledTemplate:
    environment = _environment()
    tree = environment.parse(text)
    compared = (text for node in tree.find_all(nodes.Compare) if ROLE in _words(node) for text in _compared_texts(node))
    read, roles = frozenset(_words(tree)), frozenset(compared)
    return CompiledTemplate(environment.from_string(tree), read, roles)


def check_input_size(values: Mapping[str, Any]) -> None:
    characters, num_values, left = 0, 0, [values]
    while left:
        value: Any = left.pop()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, Mapping):
            num_values += len(value)
            left.extend(value)
            left.extend(value.values())
        elif isinstance(value, (list, tuple)):
            num_values += len(value)
            left.extend(value)
        if characters > MAX_INPUT_CHARACTERS:
            raise LimitReached(f"hold more than {MAX_INPUT_CHARACTERS} characters")
        if num_values > MAX_INPUT_VALUES:
            raise LimitReached(f"hold more than {MAX_INPUT_VALUES} values")


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own convention)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # A class gives access to unbound methods, which bypass the checks on mutation.
        return not isinstance(obj, type) and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        if modifies_known_mutable(obj, attribute):  # may also be a key, so it is an error only if used
            return super().unsafe_undefined(obj, attribute)
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe.")


@lru_cache(maxsize=1)
def _environment() -> ChatEnvironment:
    # Jinja's optimizer would run parts of a template at compile time, outside of the checks on rendering.
    extensions = [GenerationBlock, loopcontrols]
    environment = ChatEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(message if isinstance(message, str) else type(message).__name__)


def _strftime_now(form: str) -> str:
    if len(form) > MAX_DATE_FORMAT:
        raise ValueError(f"a date format of {len(form)} characters is too long")
    return datetime.now().strftime(form)


def _words(node: nodes.Node) -> Iterator[str]:
    yield from (name.name for name in node.find_all(nodes.Name) if name.ctx == "load")
    yield from (field.attr for field in node.find_all(nodes.Getattr))
    yield from (constant.value for constant in node.find_all(nodes.Const) if isinstance(constant.value, str))


def _compared_texts(node: nodes.Compare) -> Iterator[str]:
    """`role == "tool"` and `role in ["tool", "ipython"]` name roles; `"role" in message` names none."""
    for side in (node.expr, *(operand.expr for operand in node.ops)):
        for constant in side.items if isinstance(side, (nodes.List, nodes.Tuple)) else [side]:
            if isinstance(constant, nodes.Const) and isinstance(constant.value, str) and constant.value != ROLE:
                yield constant.value
