"""Grammars that are small to send, and large to compile or to match: fields of `structured_output`, by name.

What each is for stands in its name. None may be answered by anything but a text that matches, or a refusal that says
why; tests/faults/test_grammar_bombs.py sends them to a process that checks grammars, bench/attacks.py to a server.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

Fields = dict[str, Any]  # of structured_output
ANY = r"(.|\n)"


def schema(value: Any) -> Fields:
    return {"json": value}


def tag(format: Any) -> Fields:
    return {"structural_tag": json.dumps({"format": format})}


def lark(*lines: str) -> Fields:
    return {"grammar": "\n".join(lines)}


def nested(value: Any, around: Callable[[Any], Any], depth: int) -> Any:
    for _ in range(depth):
        value = around(value)
    return value


def chain_of_references(num: int, around: Callable[[Any], Any]) -> Any:
    """A schema that refers to a definition, which refers to the next, several times each."""
    definitions = {f"d{index}": around({"$ref": f"#/$defs/d{index + 1}"}) for index in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{num}": {"type": "string"}}}


def bombs(number: int = 0) -> dict[str, Fields]:
    """Each number gives other texts of the same kinds, so that no cache knows them."""
    n = str(number)
    letters = "abcdefghijklmnop"
    terminals = [chr(65 + index) for index in range(21)]
    lengths = (7, 11, 13, 17, 19, 23)
    return {
        # Expressions
        "regex, nested repetitions": {"regex": "((((a{99}){99}){99}){99}){99}" + n},
        "regex, squared repetition": {"regex": "(a{1000}){1000}" + n},
        "regex, long repetition": {"regex": "a{100000}" + n},
        "regex, repeated windows": {"regex": "(.{0,60}[a-z]){60}" + n},
        "regex, repeated classes": {"regex": r"(\p{L}{0,50}\p{N}){50}" + n},
        "regex, window behind a letter": {"regex": f"{ANY}*a{ANY}{{300}}" + n},
        "regex, alternated windows": {"regex": "|".join(f".*{index}.{{50}}" for index in range(200)) + n},
        "regex, deep parentheses": {"regex": "(" * 20000 + "a" + ")" * 20000 + n},
        "regex, no character": {"regex": r"[^\x00-\x{10FFFF}]" + n},
        # Lark
        "lark, intersected lengths": lark("start: X", "X: " + " & ".join(f"/(.{{{k}}})*{n}/" for k in lengths)),
        "lark, intersected letters": lark("start: X", "X: " + " & ".join(f"/{ANY}*{c}{n}{ANY}*/" for c in letters)),
        "lark, negated windows": lark("start: X", f"X: /{ANY}*a{ANY}{{25}}/ & ~/{ANY}*b{n}{ANY}{{24}}/"),
        "lark, doubled terminals": lark(
            "start: A", *(f"{a}: {b} {b} {b} {b}" for a, b in pairwise(terminals)), f"U: /[a-z]+{n}/"
        ),
        "lark, terminals or twice": lark(
            "start: A", *(f"{a}: {b} | {b} {b}" for a, b in pairwise(terminals)), f"U: /[a-z]+{n}/"
        ),
        "lark, doubled rules": lark("start: r0", *(f"r{k}: r{k + 1} r{k + 1}" for k in range(40)), f'r40: "a{n}"'),
        "lark, doubled empty rules": lark(
            "start: r0", *(f"r{k}: r{k + 1} r{k + 1}" for k in range(40)), f'r40: "a{n}" | ""'
        ),
        "lark, nested repetitions": lark(f'start: (((("a{n}"~0..50)~0..50)~0..50)~0..50)'),
        "lark, repeated rules": lark("start: x{0,30000}", "x: y{0,30000}", f'y: "a{n}" | "bb"'),
        "lark, long repetition": lark(f'start: "a{n}"~100000'),
        "lark, ambiguous rules": lark("start: s", f's: s s s | s s | "a{n}"'),
        "lark, thousands of terminals": lark(
            "start: " + " | ".join(f"T{k}" for k in range(3000)), *(f"T{k}: /.*x{k}y{n}.*/" for k in range(3000))
        ),
        "lark, deep parentheses": lark("start: " + "(" * 20000 + f'"a{n}"' + ")" * 20000),
        "lark, itself": lark(f"start: start // {n}"),
        "lark, itself behind a letter": lark(f'start: "a{n}" start'),
        "lark, nested grammars": lark("start: " + "%lark { start: " * 50 + f'"a{n}"' + " }" * 50),
        # GBNF
        "gbnf, itself": lark(f"# {n}", "root ::= root"),
        "gbnf, deep parentheses": lark("root ::= " + "(" * 5000 + f'"a{n}"' + ")" * 5000),
        "gbnf, huge repetition": lark(f'root ::= "a{n}"{{99999999}}'),
        "gbnf, chain of rules": lark(
            "root ::= r0", *(f'r{k} ::= r{k + 1} r{k + 1} | "x"' for k in range(3000)), f'r3000 ::= "a{n}"'
        ),
        "gbnf, many classes": lark(f'root ::= "{n}" ' + "[a-z]" * 25000),
        # JSON schemas
        "schema, pattern with windows": schema({"type": "string", "pattern": f"^(.{{0,60}}[a-z]){{60}}{n}$"}),
        "schema, intersected patterns": schema(
            {"allOf": [{"type": "string", "pattern": f".*{c}.{{20}}{n}"} for c in letters]}
        ),
        "schema, pattern and length": schema(
            {"type": "string", "pattern": f"^(a|b)*c{n}(a|b){{20}}$", "minLength": 1000, "maxLength": 2000}
        ),
        "schema, alternatives multiplied": schema(
            {"allOf": [{"anyOf": [{"required": [f"p{i}_{k}_{n}"]} for k in range(4)]} for i in range(12)]}
        ),
        "schema, ranges multiplied": schema(
            {
                "title": n,
                "allOf": [
                    {"oneOf": [{"type": "integer", "minimum": k * 10 + i, "maximum": k * 10 + 9} for k in range(5)]}
                    for i in range(12)
                ],
            }
        ),
        "schema, doubled references": schema(
            chain_of_references(24, lambda ref: {"allOf": [{"properties": {f"a{n}": ref}}, {"properties": {"b": ref}}]})
        ),
        "schema, thousands of properties": schema(
            {"type": "object", "properties": {f"p{k}_{n}": {"type": "string"} for k in range(3000)}}
        ),
        "schema, large multiple": schema(
            {"title": n, "type": "integer", "multipleOf": 99991, "minimum": 0, "maximum": 10**18}
        ),
        "schema, nested hundreds deep": schema(
            nested({"const": n}, lambda inner: {"type": "array", "items": inner}, 400)
        ),
        "schema, nested lists": schema(
            nested(
                {"const": n}, lambda inner: {"type": "array", "items": inner, "minItems": 100, "maxItems": 10000}, 20
            )
        ),
        "schema, whitespace": {**schema({"title": n, "type": "object"}), "whitespace_pattern": r"(\s{0,999}){0,999}"},
        # Structural tags
        "tag, nested repetitions": tag(
            nested(
                {"type": "regex", "pattern": "(.{0,60}[a-z]){60}" + n},
                lambda inner: {"type": "repeat", "min": 1000, "max": 1024, "content": inner},
                8,
            )
        ),
        "tag, thousands of exclusions": tag({"type": "any_text", "excludes": [f"x{k}y{n}" for k in range(8000)]}),
        "tag, nested too deeply": tag(
            nested({"type": "const_string", "value": n}, lambda inner: {"type": "plus", "content": inner}, 100)
        ),
    }
