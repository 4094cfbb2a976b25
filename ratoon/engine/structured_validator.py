"""Whether what a request's text must match can be compiled: checked before the request is queued.

Errors name the keyword and its place in the schema. The grammar library does not tell the place, so parts of a refused
schema are tried until the smallest part that is refused is found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any

import msgspec

from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput

MAX_KEPT = 512  # results, of contents that were validated
MAX_TRIES = 256  # parts of a schema that are tried to find what is wrong
LONG_GRAMMAR = 2048  # characters; compiling more takes milliseconds, for which an event loop should not wait
MAX_SHOWN = 300  # characters of a message

# Keywords whose values are schemas: one, several by name, a list
OF_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
          "unevaluatedProperties", "unevaluatedItems")  # fmt: skip
OF_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
OF_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SHARED = ("$defs", "definitions", "$schema", "$id", "id")  # what other parts may refer to

Place = tuple[str, ...]


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
    try:
        problem = problem_of(grammar_text(asked, special_tokens))
    except RequestError as error:
        return error.problem, error.expected
    if problem is None:
        return None
    if asked.json_schema is not None:
        return _explain_schema(asked, json.loads(asked.json_schema), problem)
    if asked.structural_tag is not None:
        return _explain_tag(asked, json.loads(asked.structural_tag), problem)
    return _shown(problem), "see docs/structured-output.md for what is supported"


# ---- where in a schema ----


def _explain_schema(asked: StructuredOutput, schema: Any, problem: str) -> tuple[str, str]:
    place, keyword, message = _Search(asked, schema).find(problem)
    where = "#" + "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in place)
    if keyword is None:
        return f"at {where}: {_shown(message)}", "a JSON schema that can be satisfied, see docs/structured-output.md"
    return f"{keyword!r} at {where}: {_shown(message)}", "see docs/structured-output.md for supported keywords"


def _explain_tag(asked: StructuredOutput, tag: Any, problem: str) -> tuple[str, str]:
    for index, structure in enumerate(tag["structures"]):
        schema = structure["schema"]
        own = _problem_of_schema(asked, schema)
        if own is not None:
            told, expected = _explain_schema(asked, schema, own)
            return f"structures[{index}].schema: {told}", expected
    return _shown(problem), "see docs/structured-output.md for what is supported"


class _Search:
    """For the smallest part of a schema that is refused."""

    def __init__(self, asked: StructuredOutput, schema: Any) -> None:
        self._asked = asked
        self._schema = schema
        self._shared = {key: schema[key] for key in SHARED if key in schema} if isinstance(schema, dict) else {}
        self._num_tries = 0

    def find(self, problem: str) -> tuple[Place, str | None, str]:
        """Its place, its keyword and the library's message."""
        place, part, message = self._deepest((), self._schema, problem, set())
        return place, self._keyword(part, message), message

    def _deepest(self, place: Place, part: Any, problem: str, seen: set[str]) -> tuple[Place, Any, str]:
        for name, child in _parts(part):
            found = self._try(child)
            if found is not None and (name[0] not in SHARED or found == problem):
                return self._deepest((*place, *name), child, found, seen)
        reference = part.get("$ref") if isinstance(part, dict) else None
        if isinstance(reference, str) and reference not in seen:
            target = _resolve(self._schema, reference)
            if target is not None and self._try(target[1]) is not None:
                return self._deepest(*target, problem, seen | {reference})
        return place, part, problem

    def _keyword(self, part: Any, message: str) -> str | None:
        """The keyword named by the message, or the one without which the part is accepted."""
        if not isinstance(part, dict):
            return None
        own = [key for key in part if key not in SHARED]
        for key in own:
            if re.search(rf"(?<!\w){re.escape(key)}(?!\w)", message):
                return key
        for key in sorted(own, key=lambda key: key == "type"):  # the type last: others depend on it
            if len(own) > 1 and self._try({name: value for name, value in part.items() if name != key}) is None:
                return key
        return own[0] if len(own) == 1 else None

    def _try(self, part: Any) -> str | None:
        self._num_tries += 1
        if self._num_tries > MAX_TRIES or not isinstance(part, (dict, bool)):
            return None
        return _problem_of_schema(self._asked, {**self._shared, **part} if isinstance(part, dict) else part)


def _parts(schema: Any) -> Iterator[tuple[Place, Any]]:
    """The schemas directly in a schema, with their places."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in OF_LIST and isinstance(value, list):
            yield from (((key, str(index)), part) for index, part in enumerate(value))
        elif key in OF_NAMED and isinstance(value, dict):
            yield from (((key, name), part) for name, part in value.items())
        elif key in OF_ONE and isinstance(value, dict):
            yield (key,), value


def _resolve(schema: Any, reference: str) -> tuple[Place, Any] | None:
    if not reference.startswith("#/"):
        return None
    place = tuple(name.replace("~1", "/").replace("~0", "~") for name in reference[2:].split("/"))
    part = schema
    for name in place:
        if not isinstance(part, dict) or name not in part:
            return None
        part = part[name]
    return place, part


def _problem_of_schema(asked: StructuredOutput, schema: Any) -> str | None:
    from ratoon.execution.grammar.notation import grammar_text, problem_of

    plain = StructuredOutput(
        json_schema=json.dumps(schema),
        disable_any_whitespace=asked.disable_any_whitespace,
        whitespace_pattern=asked.whitespace_pattern,
        disable_additional_properties=asked.disable_additional_properties,
    )
    try:
        return problem_of(grammar_text(plain))
    except RequestError as error:
        return error.problem


def _shown(message: str) -> str:
    """On one line, without the library's options that users do not have."""
    if message.startswith("Unimplemented keys"):
        message = "is not supported"
    if message.startswith("oneOf constraints are not supported"):
        message = "oneOf is supported only where no two of its schemas can match the same value; use anyOf"
    line = " ".join(message.split())
    return line if len(line) <= MAX_SHOWN else line[:MAX_SHOWN] + "…"
