"""Whether what a request's text must match is valid and supported: what is wrong with it, and what would be right.

Errors in schemas name the keyword and the path to it (schema_problems.py). A grammar is a program of a stranger: all of
this takes as long as its author wants. It runs in a process of its own (check_process.py), which has limits.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput
from ratoon.engine.grammars.schema_problems import find_invalid, find_unenforced, locate

MAX_SHOWN = 300  # characters of a message

OTHERWISE = "docs/structured-output.md says what is supported"
# What the grammar library says where a limit of notation.LIMITS is exceeded, and the limit.
LIMITS_IN_MESSAGES = (
    ("Current row has", "max_items_in_row"),
    ("Too many items", "step_max_items"),
    ("lexer precomputation failed", "initial_lexer_fuel"),
    ("fuel exhausted", "initial_lexer_fuel"),
    ("initial lexer configuration", "initial_lexer_fuel"),
    ("too many expressions constructed", "step_lexer_fuel"),
    ("schema too large", "max_grammar_size"),
)


def validate(asked: StructuredOutput, special_tokens: Collection[str] = ()) -> None:
    """RequestError: it is malformed, unsatisfiable, not supported or too large. `special_tokens`: those of the model,
    which are no text."""
    try:
        asked.verify()
        problem = None if asked.kind is None else find_problem(asked, special_tokens)
        if problem is not None:
            assert asked.kind is not None
            raise RequestError(asked.kind, *problem)
    except RequestError as error:
        raise error.inside("structured_output") from None


def find_problem(asked: StructuredOutput, special_tokens: Collection[str] = ()) -> tuple[str, str] | None:
    """What is wrong with something whose values were verified, and what would be right."""
    from ratoon.execution.grammar.notation import grammar_text, problem_of

    malformed = find_malformed(asked)
    if malformed is not None:
        return malformed
    try:
        problem = problem_of(grammar_text(asked, special_tokens))
    except RequestError as error:
        return error.problem, error.expected
    return find_unsupported(asked, problem)


def find_malformed(asked: StructuredOutput) -> tuple[str, str] | None:
    """A schema is not one: the library can't be asked about it."""
    invalid = None if asked.json_schema is None else find_invalid(json.loads(asked.json_schema))
    return None if invalid is None else (str(invalid), OTHERWISE)


def find_unsupported(asked: StructuredOutput, problem: str | None) -> tuple[str, str] | None:
    """What texts would not have to match, although the library accepts it; or, if the library has a problem, where that
    comes from."""
    if asked.json_schema is not None:
        return _explain_valid(asked, json.loads(asked.json_schema), problem)
    if asked.structural_tag is not None:
        return _explain_tag(asked, json.loads(asked.structural_tag), problem)
    return None if problem is None else (shown(problem), OTHERWISE)


def verify_ends(asked: StructuredOutput, grammar: str, ends: Collection[str]) -> None:
    """RequestError: the grammar names a special token that ends a text, after which nothing of it could follow."""
    from ratoon.execution.grammar.lark_rules import read_rules

    rules = read_rules(grammar) if asked.grammar is not None else None
    found = set() if rules is None else rules.tokens.intersection(ends)
    if found:
        problem = f"has the token {min(found)}, which ends the text of this model"
        raise RequestError("grammar", problem, "leave it out: a text may end where the grammar does")


def _explain_tag(asked: StructuredOutput, tag: Any, problem: str | None) -> tuple[str, str] | None:
    from ratoon.execution.grammar.tag_formats import schemas_of

    if "format" in tag:
        schemas = schemas_of(tag["format"])
    else:
        schemas = ((f"structures[{index}].schema", part["schema"]) for index, part in enumerate(tag["structures"]))
    for place, schema in schemas:
        explained = _explain_schema(asked, schema, _problem_of_schema(asked, schema))
        if explained is not None:
            return f"{place}: {explained[0]}", explained[1]
    return None if problem is None else (shown(problem), OTHERWISE)


def _explain_schema(asked: StructuredOutput, schema: Any, problem: str | None) -> tuple[str, str] | None:
    found = find_invalid(schema)
    return (str(found), OTHERWISE) if found is not None else _explain_valid(asked, schema, problem)


def _explain_valid(asked: StructuredOutput, schema: Any, problem: str | None) -> tuple[str, str] | None:
    """All keywords have values of the right types."""
    found = None
    if problem is not None:
        found = locate(schema, problem, lambda part: _problem_of_schema(asked, json.loads(part)))
    if found is None:
        found = find_unenforced(schema)
    return None if found is None else (str(found), OTHERWISE)


def _problem_of_schema(asked: StructuredOutput, schema: Any) -> str | None:
    from ratoon.execution.grammar.notation import grammar_text, problem_of

    plain = StructuredOutput(
        json_schema=json.dumps(schema),
        disable_any_whitespace=asked.disable_any_whitespace,
        whitespace_pattern=asked.whitespace_pattern,
        allow_additional_properties=asked.allow_additional_properties,
    )
    try:
        return problem_of(grammar_text(plain))
    except RequestError as error:
        return error.problem


def shown(message: str) -> str:
    """A message of the grammar library on one line, with the name of the limit that it is about."""
    line = " ".join(message.replace("<non-verbose/>", "").split())
    line = line if len(line) <= MAX_SHOWN else line[:MAX_SHOWN] + "…"
    limit = next((limit for words, limit in LIMITS_IN_MESSAGES if words in line), None)
    return line if limit is None else f"exceeds the limit {limit} of the grammar library: {line}"
