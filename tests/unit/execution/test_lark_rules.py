"""What is read of grammars in Lark's notation: whether some text of theirs ends, and their special tokens."""

from __future__ import annotations

import pytest

from ratoon.execution.grammar.lark_rules import find_endless, read_rules

NUMBERS = """
// a comment: with a colon
%llguidance {"no_forcing": true}
%import common.INT
%ignore /[ \\t]+/
?start: sum -> total
      | "none"i
sum: product | sum "+" product   # left-recursive
product.2[lazy]: atom ("*" atom)~0..3
atom: INT | "(" sum ")" | %json {"type": "object", "x": "}"} | "a".."f" | /[a-z]\\/{2,3}/ | <|tool|>
"""


@pytest.mark.parametrize(
    ("grammar", "endless"),
    [
        ("start: start", "start"),
        ('start: "a" start', "start"),
        ('start: "a" b\nb: "(" b ")"', "start"),
        ('start: "a" b\nb: "(" b ")" | "x" start', "start"),
        ('start: b~2..3\nb: b "x"', "start"),
        ('start: b{1,2}\nb: b "x"', "start"),
        ('start: b+\nb: [c] b\nc: "c"', "start"),
        ("start: B\nB: C\nC: B", "start"),
        ('start: "a" start | "b"', None),
        ('start: "a" start?', None),
        ('start: "a" [start]', None),
        ('start: ("a" start)*', None),
        ("start: b~0..3\nb: b", None),
        ("start: b{,3}\nb: b", None),
        ('start: "x" | b\nb: b', None),
        ("start: A & ~/b/\nA: /a/", None),
        ('start: "root: x" /a:b/', None),
        (NUMBERS, None),
    ],
)
def test_a_grammar_without_a_text_that_ends_is_found(grammar: str, endless: str | None) -> None:
    rules = read_rules(grammar)
    assert rules is not None
    assert find_endless(rules) == endless


def test_special_tokens_are_found_outside_of_texts() -> None:
    rules = read_rules('start: "<|a|>" <|b|> (/<|c|>/ | <[5]>)')
    assert rules is not None and rules.tokens == {"<|b|>", "<[5]>"}


@pytest.mark.parametrize("grammar", ["start", ")", "start: (a", "start: %json {", "start::p: x", "(" * 5000])
def test_what_is_not_understood_is_left_to_the_library(grammar: str) -> None:
    rules = read_rules(grammar)
    assert rules is None or find_endless(rules) in (None, "start")


def test_long_chains_take_few_rounds() -> None:
    for order in (1, -1):
        lines = [f"r{index}: r{index + 1}" for index in range(5000)] + ['r5000: "a"']
        rules = read_rules("start: r0\n" + "\n".join(lines[::order]))
        assert rules is not None and find_endless(rules) is None
