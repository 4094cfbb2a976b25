"""The rules of a grammar in Lark's notation, read as far as it takes to see what the grammar library does not look at:
whether they describe any text that ends, and which special tokens they name.

The library remains the judge of the notation: what is not understood here is taken to be right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

MAX_DEPTH = 100  # of parentheses; the library refuses more

_BLANK = re.compile(r"(?:[ \t\r\n]|//[^\n]*|\#[^\n]*)+")
_HEAD = re.compile(
    r"[?!]?(?P<name>[A-Za-z_][A-Za-z0-9_-]*)\s*(?:\.\s*-?\d+)?\s*(?:\[[^\]]*\])?\s*:(?!:)"  # name.priority[attributes]:
)
_STATEMENT = re.compile(r"%(?P<name>\w+)")
_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"i?')
_REGEX = re.compile(r"/(?!/)(?:[^/\\\n]|\\.)+/[a-z]*")
_TOKEN = re.compile(r"<[^<>\s]+>")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_REPEAT = re.compile(r"~\s*(?P<least>\d+)(?:\s*\.\.\s*\d+)?|\{\s*(?P<low>\d*)\s*(?:,\s*\d*\s*)?\}")
_ALIAS = re.compile(r"->\s*\w+")
_VALUES = ("json", "regex", "lark")  # statements that stand for text, with an object or a grammar in braces

# Whether a part has a text that ends, given which rules have one.
HasText = Callable[[set[str]], bool]


class NotUnderstoodError(Exception):
    pass


@dataclass
class Rules:
    bodies: dict[str, HasText] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)  # special tokens, as they are written: <|end|>, <[5]>


def read_rules(grammar: str) -> Rules | None:
    """None: it is not understood."""
    try:
        return _Reader(grammar).read()
    except (NotUnderstoodError, RecursionError):
        return None


def find_endless(rules: Rules) -> str | None:
    """The name of a rule of which every text would have to contain another one of itself, for ever, where the whole
    grammar is no better. None: there is a text that ends."""
    finite: set[str] = set()
    order = list(rules.bodies)
    while True:
        order.reverse()  # so that neither order of a long chain takes many rounds
        found = len(finite)
        for name in order:
            if name not in finite and rules.bodies[name](finite):
                finite.add(name)
        if "start" in finite or "start" not in rules.bodies:
            return None
        if len(finite) == found:
            return next((name for name in rules.bodies if name not in finite), "start")


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._rules = Rules()
        self._used: set[str] = set()  # names of rules

    def read(self) -> Rules:
        bodies: dict[str, list[HasText]] = {}
        while not self._is_at_end():
            if (statement := self._take(_STATEMENT)) is not None:
                self._skip_statement(statement["name"])
                continue
            head = self._take(_HEAD)
            if head is None:
                raise NotUnderstoodError
            bodies.setdefault(head["name"], []).append(self._alternatives(0))
        self._rules.bodies = {name: _any_of(ways) for name, ways in bodies.items()}
        for used in self._used - bodies.keys():  # imported, or unknown: the library decides
            self._rules.bodies[used] = lambda finite: True
        return self._rules

    def _alternatives(self, depth: int) -> HasText:
        if depth > MAX_DEPTH:
            raise NotUnderstoodError
        ways = [self._sequence(depth)]
        while self._take_character("|"):
            ways.append(self._sequence(depth))
        return _any_of(ways)

    def _sequence(self, depth: int) -> HasText:
        parts = list(self._parts(depth))
        self._take(_ALIAS)
        return _all_of(parts)

    def _parts(self, depth: int) -> Iterator[HasText]:
        while (part := self._part(depth)) is not None:
            while True:
                if self._take_character("?*"):
                    part = _always
                elif (repeat := self._take(_REPEAT)) is not None:
                    part = part if int(repeat["least"] or repeat["low"] or 0) else _always
                elif not self._take_character("+"):
                    break
            yield part
            self._take_character("&")  # of terminals: both sides must have a text

    def _part(self, depth: int) -> HasText | None:
        """None: the sequence ends here."""
        if self._is_at_end() or self._peek(_HEAD) is not None:
            return None
        if self._take_character("("):
            inner = self._alternatives(depth + 1)
            self._expect(")")
            return inner
        if self._take_character("["):
            self._alternatives(depth + 1)
            self._expect("]")
            return _always
        if self._take_character("~"):  # what a terminal is not
            return None if self._part(depth + 1) is None else _always
        if (token := self._take(_TOKEN)) is not None:
            self._rules.tokens.add(token[0])
            return _always
        if self._take(_TEXT) is not None:
            self._skip_range()
            return _always
        if self._take(_REGEX) is not None:
            return _always
        statement = self._peek(_STATEMENT)
        if statement is not None:
            if statement["name"] not in _VALUES:
                return None
            self._place = statement.end()
            self._skip_braces()
            return _always
        name = self._take(_NAME)
        if name is None:
            return None
        self._used.add(name[0])
        return _rule_named(name[0])

    def _skip_range(self) -> None:
        if self._text.startswith("..", self._place):
            self._place += 2
            self._take(_TEXT)

    def _skip_statement(self, name: str) -> None:
        if name in _VALUES:
            raise NotUnderstoodError
        self._skip_blanks_of_line()
        if self._text.startswith("{", self._place):
            self._skip_braces()
        end = self._text.find("\n", self._place)
        self._place = len(self._text) if end < 0 else end

    def _skip_blanks_of_line(self) -> None:
        while self._text.startswith((" ", "\t"), self._place):
            self._place += 1

    def _skip_braces(self) -> None:
        self._skip_blanks()
        if not self._text.startswith("{", self._place):
            raise NotUnderstoodError
        depth = 0
        for found in re.compile(r'"(?:[^"\\\n]|\\.)*"|[{}]').finditer(self._text, self._place):
            depth += {"{": 1, "}": -1}.get(found[0], 0)
            if depth == 0:
                self._place = found.end()
                return
        raise NotUnderstoodError

    def _skip_blanks(self) -> None:
        found = _BLANK.match(self._text, self._place)
        if found is not None:
            self._place = found.end()

    def _is_at_end(self) -> bool:
        self._skip_blanks()
        return self._place >= len(self._text)

    def _peek(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self._skip_blanks()
        return pattern.match(self._text, self._place)

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = self._peek(pattern)
        if found is not None:
            self._place = found.end()
        return found

    def _take_character(self, characters: str) -> bool:
        self._skip_blanks()
        if self._place < len(self._text) and self._text[self._place] in characters:
            self._place += 1
            return True
        return False

    def _expect(self, character: str) -> None:
        if not self._take_character(character):
            raise NotUnderstoodError


def _always(finite: set[str]) -> bool:
    return True


def _rule_named(name: str) -> HasText:
    return lambda finite: name in finite


def _any_of(ways: list[HasText]) -> HasText:
    return ways[0] if len(ways) == 1 else lambda finite: any(way(finite) for way in ways)


def _all_of(parts: list[HasText]) -> HasText:
    needed = [part for part in parts if part is not _always]
    if not needed:
        return _always
    return needed[0] if len(needed) == 1 else lambda finite: all(part(finite) for part in needed)
