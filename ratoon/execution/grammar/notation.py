"""From what a request asks for to the notation of the grammar library, an extension of Lark's.

Needs no vocabulary, except for the names of special tokens: these are no text, and are written in another way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput
from ratoon.execution.grammar.date_formats import spell_out_dates
from ratoon.execution.grammar.lark_rules import find_endless, read_rules
from ratoon.execution.grammar.tag_formats import ANY_TEXT, FormatWriter

# Bounds of the work of a compilation and of one mask (about 10 to 20 ms each) and of memory (about 2 KB for a state).
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=20_000,  # an item for each of the alternatives that begin at one place
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
# Without u: the library lets names of additional properties be written with any \u escape, so that a name that
# `properties` has could come with any value.
ESCAPES = 'nrbtf\\"'


_IS_LARK = re.compile(r"^\s*(%llguidance\b|[?!]?start\s*(\.\s*\d+\s*)?(\[[^\]\n]*\]\s*)?:(?!:))", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|.)", re.DOTALL)

_SPECIAL_CHARACTERS = re.compile(r"[^\w ]")  # that may have a meaning in a regular expression


def grammar_text(asked: StructuredOutput, special_tokens: Collection[str] = ()) -> str:
    """RequestError where the notation alone is wrong; `problem_of` tells what is wrong with the rest."""
    if asked.translation is not None:  # it was written before, where the request was checked
        return asked.translation
    if asked.json_schema is not None:
        return _of_schema(asked, json.loads(asked.json_schema))
    if asked.json_object:
        return _of_schema(asked, {"type": "object"})
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(without_anchors(asked.regex))
    if asked.choice is not None:
        # One lexeme, which takes one item of the parser. It is text: what is spelt like a special token is written by
        # ordinary tokens.
        return LLMatcher.grammar_from_lark(f"start: /{'|'.join(map(_escaped, sorted(set(asked.choice))))}/")
    if asked.grammar is not None:
        return LLMatcher.grammar_from_lark(_lark(asked.grammar))
    assert asked.structural_tag is not None, "verified"
    return LLMatcher.grammar_from_lark(_of_structural_tag(asked, json.loads(asked.structural_tag), special_tokens))


def problem_of(grammar: str) -> str | None:
    """Why the library refuses a grammar. None: it does not."""
    return LLMatcher.validate_grammar(grammar, limits=LIMITS) or None


# ---- JSON ----


def _json_options(asked: StructuredOutput) -> dict[str, Any]:
    """They override those in the schema ("x-guidance"): a keyword that is not supported is never ignored."""
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": ESCAPES}
    if asked.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if asked.whitespace_pattern is not None:
        options["whitespace_pattern"] = asked.whitespace_pattern
    return options


def _enforced(asked: StructuredOutput, schema: Any) -> Any:
    """The schema for the library: what texts match where `schema` was given."""
    return spell_out_dates(asked.enforced(schema))


def _of_schema(asked: StructuredOutput, schema: Any) -> str:
    if schema is False:
        raise RequestError("json_schema", "Unsatisfiable schema: false matches nothing", "another schema")
    if schema is True:
        schema = {}
    text, options = json.dumps(_enforced(asked, schema), ensure_ascii=False), _json_options(asked)
    if "\\u00" in text or "\x7f" in text:  # characters that JSON can't write in another way
        options["json_allowed_escapes"] += "u"
    return LLMatcher.grammar_from_json_schema(
        text,
        overrides=options,  # type: ignore[arg-type]
    )


# ---- expressions and grammars ----


def without_anchors(regex: str) -> str:
    """The whole text must match anyway."""
    regex = regex.removeprefix("^")
    backslashes = re.search(r"(\\*)\$\Z", regex)
    return regex[:-1] if backslashes and len(backslashes[1]) % 2 == 0 else regex


def _lark(grammar: str) -> str:
    """In Lark's notation, from that or from GBNF."""
    expected = "a grammar in Lark's notation or in GBNF"
    is_lark = _IS_LARK.search(grammar) is not None
    try:
        text = grammar if is_lark else gbnf_to_lark(_ESCAPE.sub(_plain_character, grammar))
    except RecursionError:
        raise RequestError("grammar", "is nested too deeply", "fewer parentheses within each other") from None
    except Exception as error:  # its own exceptions have no common class
        raise RequestError("grammar", f"is not valid: {error}", expected) from None
    rules = read_rules(text)
    endless = None if rules is None else find_endless(rules)
    if endless is not None:
        endless = "root" if endless == "start" and not is_lark else endless
        problem = f"allows no text: each text of the rule {endless!r} would have to contain another one, for ever"
        raise RequestError("grammar", problem, f"a way to end the rule {endless!r}")
    return text


def _plain_character(escape: re.Match[str]) -> str:
    """An escape of GBNF as the translation to Lark's notation reads it."""
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code < 0x80:  # it may have a meaning: it stays an escape
        return f"\\x{code:02x}"
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{escape[0]} is no character")
    return chr(code)


def _escaped(text: str) -> str:
    """A regular expression that matches this text."""
    return _SPECIAL_CHARACTERS.sub(_escape, text)


def _escape(character: re.Match[str]) -> str:
    return f"\\x{{{ord(character[0]):x}}}"


def _literal(text: str, special_tokens: Collection[str]) -> str:
    """Text as Lark's notation has it. Special tokens in it stay tokens."""
    names = sorted((name for name in special_tokens if name and name in text), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    written = [_special(part) if part in names else json.dumps(part, ensure_ascii=False) for part in parts if part]
    return " ".join(written) if written else '""'


def _special(name: str) -> str:
    return name if re.fullmatch(r"<[^<>\s]+>", name) else json.dumps(name, ensure_ascii=False)


# ---- structural tags ----


def _of_structural_tag(asked: StructuredOutput, tag: dict[str, Any], special_tokens: Collection[str]) -> str:
    """Free text; behind a trigger, one of the structures that begin with it. Or, in the newer form, a tree."""
    if "format" in tag:
        return _of_format(asked, tag, special_tokens)
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures:
        expected = '{"structures": [{"begin": …, "schema": …, …}], "triggers": […]}, or {"format": {…}}'
        raise RequestError("structural_tag", "has no structures", expected)
    if not isinstance(triggers, list) or not triggers or not all(isinstance(text, str) and text for text in triggers):
        raise RequestError("structural_tag", "has no triggers", 'a list of texts, {"triggers": […], …}')
    lines = [
        f"start: ({' | '.join(f'tag_{index}' for index in range(len(structures)))})* rest",
        "rest: TEXT",
        f"TEXT: {ANY_TEXT}",
    ]
    options = json.dumps(_json_options(asked))
    for index, structure in enumerate(structures):
        place = f"structures[{index}]"
        begin, schema, end = _parts_of(structure, place)
        trigger = max((text for text in triggers if begin.startswith(text)), key=len, default=None)
        if trigger is None:
            raise RequestError("structural_tag", f"{place}.begin {begin!r} begins with no trigger", "one of them")
        schema = _enforced(asked, schema)
        if isinstance(schema, dict):
            schema = {**schema, "x-guidance": json.loads(options)}
        rest = begin[len(trigger) :]
        body = " ".join(
            [
                _literal(rest, special_tokens) if rest else "",
                "%json " + json.dumps(schema, ensure_ascii=False),
                _literal(end, special_tokens) if end else "",
            ]
        )
        if trigger in special_tokens:
            lines.append(f"tag_{index}: TEXT {_special(trigger)} {body}")
        else:
            lines.append(f"tag_{index}_head[lazy]: TEXT {_literal(trigger, ())}")
            lines.append(f"tag_{index}: tag_{index}_head {body}")
    return "\n".join(lines) + "\n"


def _of_format(asked: StructuredOutput, tag: dict[str, Any], special_tokens: Collection[str]) -> str:
    for name in ("structures", "triggers"):
        if tag.get(name):
            raise RequestError("structural_tag", f"{name} contradicts format", "one of the two forms")

    def schema_part(schema: Any) -> str:
        schema = {} if schema is True else _enforced(asked, schema)
        return "%json " + json.dumps({**schema, "x-guidance": _json_options(asked)})

    def regex_part(pattern: str) -> str:
        slashes = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", without_anchors(pattern), flags=re.DOTALL)
        return "/" + slashes.replace("\n", r"\n") + "/"

    def literal(text: str) -> str:
        return _literal(text, special_tokens)

    return FormatWriter(special_tokens, literal, schema_part, regex_part, _lark).write(tag["format"])


def _parts_of(structure: Any, place: str) -> tuple[str, Any, str]:
    if not isinstance(structure, dict):
        raise RequestError("structural_tag", f"{place} is not an object", '{"begin": …, "schema": …, "end": …}')
    begin, end, schema = structure.get("begin"), structure.get("end", ""), structure.get("schema")
    for name, text in (("begin", begin), ("end", end)):
        if not isinstance(text, str):
            raise RequestError("structural_tag", f"{place}.{name} is not text", "text")
    if not isinstance(schema, (dict, bool)):
        raise RequestError("structural_tag", f"{place}.schema is not a JSON schema", "an object")
    assert isinstance(begin, str) and isinstance(end, str)
    return begin, schema, end
