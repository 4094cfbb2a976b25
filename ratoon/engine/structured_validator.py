"""Whether what a request's text must match can be compiled: checked before the request is queued.

Errors in schemas name the keyword and the path to it (schema_problems.py).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import msgspec

from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput
from ratoon.engine.schema_problems import find_invalid, find_unenforced, locate

MAX_KEPT = 512  # results, of contents that were validated
LONG_GRAMMAR = 2048  # characters; compiling more takes milliseconds, for which an event loop should not wait
MAX_SHOWN = 300  # characters of a message

OTHERWISE = "docs/structured-output.md says what is supported"


def validate(asked: StructuredOutput, special_tokens: Collection[str] = ()) -> None:
    """RequestError: it is malformed, unsatisfiable, not supported or too large. `special_tokens`: those of the model,
    which are no text. Takes milliseconds for large schemas; a content that was validated before, microseconds."""
    try:
        asked.verify()
        if asked.kind is not None:  # otherwise the parent's is continued, which was validated
            plain = msgspec.structs.replace(asked, begins_after=None, continue_grammar=False, first_token=None)
            problem = _problem(msgspec.msgpack.encode(plain), frozenset(special_tokens))
            if problem is not None:
                raise RequestError(asked.kind, *problem)
    except RequestError as error:
        raise error.inside("structured_output") from None


def takes_long(asked: Any) -> bool:
    """Whether an event loop should not wait for `validate`."""
    if not isinstance(asked, StructuredOutput):
        return False
    texts = (asked.json_schema, asked.regex, asked.grammar, asked.structural_tag, *(asked.choice or ()))
    return sum(len(text) for text in texts if isinstance(text, str)) > LONG_GRAMMAR


@lru_cache(MAX_KEPT)
def _problem(content: bytes, special_tokens: frozenset[str]) -> tuple[str, str] | None:
    """What is wrong, and what would be right."""
    from ratoon.execution.grammar.notation import grammar_text, problem_of

    asked = msgspec.msgpack.decode(content, type=StructuredOutput)
    schema = None if asked.json_schema is None else json.loads(asked.json_schema)
    if schema is not None and (invalid := find_invalid(schema)) is not None:
        return str(invalid), OTHERWISE
    try:
        problem = problem_of(grammar_text(asked, special_tokens))
    except RequestError as error:
        return error.problem, error.expected
    if schema is not None:
        return _explain_valid(asked, schema, problem)
    if asked.structural_tag is not None:
        return _explain_tag(asked, json.loads(asked.structural_tag), problem)
    return None if problem is None else (_shown(problem), OTHERWISE)


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
    return None if problem is None else (_shown(problem), OTHERWISE)


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


def _shown(message: str) -> str:
    """On one line."""
    line = " ".join(message.split())
    return line if len(line) <= MAX_SHOWN else line[:MAX_SHOWN] + "…"
