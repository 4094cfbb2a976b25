"""Structural tags of the form {"format": {"type": "sequence" | "tag" | "triggered_tags" | …}}: a tree of formats, each
of which describes a part of the text. Names and meanings follow xgrammar, whose form this is.

What can't be translated is refused with its place: formats of single tokens, other notations of arguments than JSON,
and free text of which nothing tells where it ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

from ratoon.core.errors import RequestError

ANY_TEXT = r"/(.|\n)*/"
MAX_DEPTH = 32
MAX_REPEATS = 1024
KINDS = (
    "const_string", "json_schema", "regex", "grammar", "any_text", "sequence", "or", "optional", "star", "plus",
    "repeat", "tag", "triggered_tags", "tags_with_separator",
)  # fmt: skip
INNER = {"sequence": "elements", "or": "elements", "triggered_tags": "tags", "tags_with_separator": "tags"}

# What follows a part: nothing, some other part, or the end of the tag that it is the content of.
Follows = Literal["nothing", "another"] | tuple[str, ...]
Format = Mapping[str, Any]


def schemas_of(format: Any, place: str = "format") -> Iterator[tuple[str, Any]]:
    """The JSON schemas in a format that was written, and their places."""
    if format.get("type") == "json_schema":
        yield f"{place}.json_schema", format["json_schema"]
    for index, inner in enumerate(format.get(INNER.get(format.get("type", ""), ""), ())):
        yield from schemas_of(inner, f"{place}.{INNER[format['type']]}[{index}]")
    if "content" in format:
        yield from schemas_of(format["content"], f"{place}.content")


class FormatWriter:
    """Writes a format as rules in Lark's notation as the grammar library has it."""

    def __init__(
        self,
        special_tokens: Collection[str],
        literal: Callable[[str], str],
        schema: Callable[[Any], str],  # a JSON schema as the library's notation has it
        regex: Callable[[str], str],  # without anchors
        grammar: Callable[[str], str],  # in the library's own notation
    ) -> None:
        self._special_tokens = special_tokens
        self._literal = literal
        self._schema = schema
        self._regex = regex
        self._grammar = grammar
        self._rules: list[str] = []

    def write(self, format: Any) -> str:
        """The whole grammar. RequestError, of structural_tag, names the place of what is wrong."""
        start = self._write(format, "format", "nothing", 0)
        return "\n".join([f"start: {start}", f"TEXT: {ANY_TEXT}", *self._rules]) + "\n"

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"PART_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _write(self, format: Any, place: str, follows: Follows, depth: int) -> str:
        """An expression, which includes the end of the tag where that follows."""
        if depth > MAX_DEPTH:
            raise _wrong(place, "is nested too deeply", f"{MAX_DEPTH} levels at most")
        if not isinstance(format, dict):
            raise _wrong(place, "is not an object", '{"type": "tag", …}')
        kind = format.get("type")
        if kind not in KINDS:
            problem = "has no type" if kind is None else f"has the type {str(kind)[:64]!r}, which is not supported"
            raise _wrong(place, problem, f"one of {', '.join(KINDS)}")
        if kind == "any_text":
            return self._any_text(format, place, follows)
        if kind == "sequence":
            elements = _list_of(format, place, "elements")
            parts = [
                self._write(
                    element,
                    f"{place}.elements[{index}]",
                    follows if index == len(elements) - 1 else "another",
                    depth + 1,
                )
                for index, element in enumerate(elements)
            ]
            return " ".join(parts)
        if kind == "or":
            ways = [
                self._rule(self._write(element, f"{place}.elements[{index}]", follows, depth + 1))
                for index, element in enumerate(_list_of(format, place, "elements"))
            ]
            return f"({' | '.join(ways)})"
        if kind == "triggered_tags":
            part = self._triggered_tags(format, place, follows, depth)
        else:
            part = self._limited(kind, format, place, depth)
        return f"{part} {self._end(follows)}" if isinstance(follows, tuple) else part

    def _limited(self, kind: str, format: Format, place: str, depth: int) -> str:
        """Formats of which it is known where they end."""
        match kind:
            case "const_string":
                return self._literal(_text_of(format, place, "value"))
            case "json_schema":
                return self._rule(self._json_schema(format, place))
            case "regex":
                _refuse(format, place, "excludes")
                return self._rule(self._regex(_text_of(format, place, "pattern")))
            case "grammar":
                return self._rule(f"%lark {{\n{self._grammar(_text_of(format, place, 'grammar'))}\n}}")
            case "tag":
                return self._tag(format, place, depth)
            case "tags_with_separator":
                return self._tags_with_separator(format, place, depth)
        content = self._rule(self._write(format.get("content"), f"{place}.content", "another", depth + 1))
        if kind != "repeat":
            return content + {"optional": "?", "star": "*", "plus": "+"}[kind]
        low, high = _repeats_of(format, place)
        return f"{content}{{{low},{'' if high == -1 else high}}}"

    def _json_schema(self, format: Format, place: str) -> str:
        if format.get("style", "json") != "json":
            raise _wrong(f"{place}.style", f"{str(format['style'])[:64]!r} is not supported", "json")
        schema = format.get("json_schema")
        if not isinstance(schema, (dict, bool)):
            raise _wrong(f"{place}.json_schema", "is not a JSON schema", "an object")
        if schema is False:
            raise _wrong(f"{place}.json_schema", "allows no value", "another schema")
        return self._schema(schema)

    # ---- tags ----

    def _tag(self, format: Any, place: str, depth: int, num_read: int = 0) -> str:
        """`num_read`: characters of `begin` that were read before, as a trigger."""
        if not isinstance(format, dict) or format.get("type", "tag") != "tag":
            raise _wrong(place, "is not a tag", '{"begin": …, "content": …, "end": …}')
        begin, ends = _text_of(format, place, "begin")[num_read:], _ends_of(format, place)
        content = self._write(format.get("content"), f"{place}.content", ends, depth + 1)
        return f"{self._literal(begin)} {content}" if begin else content

    def _end(self, ends: tuple[str, ...]) -> str:
        ways = [self._literal(end) for end in ends]
        return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"

    def _tags_with_separator(self, format: Format, place: str, depth: int) -> str:
        separator = _text_of(format, place, "separator")
        tag = self._rule(" | ".join(self._tags(format, place, depth)))
        more = "" if _flag(format, place, "stop_after_first") else f" ({self._literal(separator)} {tag})*"
        return f"{tag}{more}" if _flag(format, place, "at_least_one") else f"({tag}{more})?"

    def _tags(self, format: Format, place: str, depth: int) -> list[str]:
        tags = enumerate(_list_of(format, place, "tags"))
        return [self._rule(self._tag(tag, f"{place}.tags[{index}]", depth + 1)) for index, tag in tags]

    def _triggered_tags(self, format: Format, place: str, follows: Follows, depth: int) -> str:
        """Free text; behind a trigger, one of the tags that begin with it. With `at_least_one`, a tag comes first."""
        _refuse(format, place, "excludes")
        at_least_one, stop = _flag(format, place, "at_least_one"), _flag(format, place, "stop_after_first")
        if follows != "nothing" and not (at_least_one and stop):
            raise _wrong(place, "has free text behind its tags, and is not the last part", "put it at the end")
        first = f"({' | '.join(self._tags(format, place, depth))})" if at_least_one else ""
        if at_least_one and stop:
            return first
        tag = self._rule(" | ".join(self._behind_triggers(format, place, depth)))
        return f"({tag} | TEXT)" if stop else f"{first} {tag}* TEXT"

    def _behind_triggers(self, format: Format, place: str, depth: int) -> Iterator[str]:
        """For each trigger, the text up to it and the tags that begin with it."""
        triggers = _list_of(format, place, "triggers")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise _wrong(f"{place}.triggers", "is not a list of texts", '["<function="]')
        of_trigger: dict[str, list[str]] = {}
        for index, tag in enumerate(_list_of(format, place, "tags")):
            inner = f"{place}.tags[{index}]"
            begin = _text_of(tag, inner, "begin") if isinstance(tag, dict) else ""
            trigger = max((text for text in triggers if begin.startswith(text)), key=len, default=None)
            if trigger is None:
                raise _wrong(f"{inner}.begin", f"{begin[:64]!r} begins with no trigger", "one of the triggers")
            of_trigger.setdefault(trigger, []).append(self._rule(self._tag(tag, inner, depth + 1, len(trigger))))
        for trigger, tags in of_trigger.items():
            yield f"{self._text_up_to((trigger,))} ({' | '.join(tags)})"

    # ---- free text ----

    def _any_text(self, format: Format, place: str, follows: Follows) -> str:
        _refuse(format, place, "max_tokens")
        excludes = format.get("excludes") or []
        if not isinstance(excludes, list) or not all(isinstance(text, str) and text for text in excludes):
            raise _wrong(f"{place}.excludes", "is not a list of texts", '["<function="]')
        if follows == "another" or (isinstance(follows, tuple) and "" in follows):
            problem = "is free text, and nothing tells where it ends"
            raise _wrong(place, problem, "put it at the end, or into a tag with an end")
        if isinstance(follows, tuple):
            return self._text_up_to(follows, tuple(excludes))
        return self._terminal(f"{ANY_TEXT}{_without(excludes)}") if excludes else "TEXT"

    def _text_up_to(self, ends: tuple[str, ...], excludes: tuple[str, ...] = ()) -> str:
        """Any text up to the first of these, which is included."""
        plain = [end for end in ends if end not in self._special_tokens]
        before = self._terminal(f"{ANY_TEXT}{_without(excludes)}") if excludes else "TEXT"
        ways = [f"{before} {self._literal(end)}" for end in ends if end in self._special_tokens]
        if plain:
            regex = rf"/(.|\n)*({'|'.join(map(_escaped, plain))})/"
            # What may be excluded is looked for in the text before the end, which may itself be one of them
            outside = [text for text in excludes if text not in ends]
            ways.append(self._rule(self._terminal(f"{regex}{_without(outside)}"), "[lazy]"))
        return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"


def _without(texts: Collection[str]) -> str:
    """Returns what follows the expression of a terminal to exclude text that has one of these in it."""
    return rf" & ~/(.|\n)*({'|'.join(map(_escaped, texts))})(.|\n)*/" if texts else ""


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", "n")  # re.escape puts a backslash before a line break


def _wrong(place: str, problem: str, expected: str) -> RequestError:
    return RequestError("structural_tag", f"{place} {problem}", expected)


def _text_of(format: Format, place: str, name: str) -> str:
    value = format.get(name)
    if isinstance(value, dict) and value.get("type") == "token":
        raise _wrong(f"{place}.{name}", "is a token, which is not supported", "the token's text")
    if not isinstance(value, str):
        raise _wrong(f"{place}.{name}", "is missing, or not text", "text")
    return value


def _ends_of(format: Format, place: str) -> tuple[str, ...]:
    end = format.get("end", "")
    if isinstance(end, list) and end and all(isinstance(text, str) for text in end):
        return tuple(end)
    return (_text_of({"end": end}, place, "end"),)


def _list_of(format: Format, place: str, name: str) -> list[Any]:
    value = format.get(name)
    if not isinstance(value, list) or not value:
        raise _wrong(f"{place}.{name}", "is missing, empty, or not a list", "a list")
    return value


def _flag(format: Format, place: str, name: str) -> bool:
    value = format.get(name, False)
    if not isinstance(value, bool):
        raise _wrong(f"{place}.{name}", "is neither true nor false", "true or false")
    return value


def _repeats_of(format: Format, place: str) -> tuple[int, int]:
    low, high = format.get("min"), format.get("max")
    for name, value, least in (("min", low, 0), ("max", high, -1)):
        if type(value) is not int or not least <= value <= MAX_REPEATS:
            raise _wrong(f"{place}.{name}", f"{str(value)[:64]} is out of range", f"from {least} to {MAX_REPEATS}")
    assert isinstance(low, int) and isinstance(high, int)
    if high != -1 and high < low:
        raise _wrong(f"{place}.max", f"{high} is less than min, {low}", "at least min, or -1 for no limit")
    return low, high


def _refuse(format: Format, place: str, name: str) -> None:
    if format.get(name) not in (None, []):
        raise _wrong(f"{place}.{name}", "is not supported", "leave it out")
