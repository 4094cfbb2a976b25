"""Closes the objects of a JSON schema: they get no properties but those that the schema names.

JSON Schema allows any further property where `additionalProperties` is left out. Models that generate text by such a
schema write properties until their answer is cut off, and those who write schemas rarely mean it, so `properties`
without `additionalProperties` is taken for a complete list here, as OpenAI's strict mode and llama.cpp take it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

# Keywords with schemas: by name, in a list, and single ones.
BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = (
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
IN_PLACE = ("allOf", "anyOf", "oneOf")  # schemas for the same value, as the target of a $ref is
SAYS_OTHERWISE = ("additionalProperties", "patternProperties", "unevaluatedProperties")
MAX_STEPS = 200_000  # of the search for schemas of the same value: a tenth of a second

Schema = dict[str, Any]
Path = tuple[str | int, ...]  # from the root of a document to a part of it


def close_objects(schema: Any) -> Any:
    """A copy of the schema in which objects are closed. Where several schemas describe one object (`allOf`, or
    `properties` beside `anyOf` or `$ref`), it is closed to the names of all of them; one that is part of such a
    description in one place stays open in others. A schema with more references than can be followed in a short time
    is returned as it is."""
    if not isinstance(schema, dict):
        return schema
    copy = json.loads(json.dumps(schema))
    try:
        _Closing(copy).close()
    except _TooManyStepsError:
        return schema
    return copy


class _TooManyStepsError(Exception):
    pass


class _Closing:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_steps = 0

    def close(self) -> None:
        schemas = list(iterate_schemas(self._root))
        joined = [schema for schema in schemas if self._is_joined(schema)]
        inner = {id(part) for schema in joined for part in self._in_place(schema) if part is not schema}
        together = {id(schema) for schema in joined}
        changes = [
            (schema, self._closed_together(schema) if id(schema) in together else self._closed(schema))
            for schema in schemas
            if id(schema) not in inner
        ]
        for schema, change in changes:  # at the end: a schema may be read as part of several others
            schema.update(change)

    def _closed(self, schema: Schema) -> Schema:
        """The keywords that close a schema that describes an object alone."""
        properties = schema.get("properties")
        if not isinstance(properties, dict) or _says_otherwise(schema):
            return {}
        unnamed = {name: True for name in self._required_names(schema) if name not in properties}
        return {"properties": {**properties, **unnamed}, "additionalProperties": False}

    def _closed_together(self, schema: Schema) -> Schema:
        """Closes a schema that is one of several: a further part of `allOf`, with the names of all."""
        parts = list(self._in_place(schema))
        if any(_says_otherwise(part) for part in parts):
            return {}
        names = {name: True for part in parts for name in part.get("properties", ())}
        names |= dict.fromkeys(self._required_names(schema), True)
        self._step(len(names))
        closing = {"properties": names, "additionalProperties": False}
        return {"allOf": [*schema.get("allOf", ()), closing]}

    def _required_names(self, schema: Schema) -> Iterator[str]:
        for part in self._in_place(schema):
            required = part.get("required")
            yield from (name for name in required if isinstance(name, str)) if isinstance(required, list) else ()

    def _is_joined(self, schema: Schema) -> bool:
        """Whether more than one schema describes the properties of its object. Alternatives count as one."""
        target = self._target(schema)
        ways = [
            _describes(schema),
            target is not None and self._describes_in_place([target]),
            *(self._describes_in_place([part]) for part in _parts(schema, "allOf")),
            self._describes_in_place(_parts(schema, "anyOf")),
            self._describes_in_place(_parts(schema, "oneOf")),
        ]
        return sum(ways) > 1

    def _describes_in_place(self, schemas: list[Schema]) -> bool:
        return any(_describes(part) for schema in schemas for part in self._in_place(schema))

    def _in_place(self, schema: Schema) -> Iterator[Schema]:
        """The schema, and all others for the same value that it has or refers to, each once."""
        seen: set[int] = set()
        waiting = [schema]
        while waiting:
            part = waiting.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            self._step()
            yield part
            target = self._target(part)
            waiting += [] if target is None else [target]
            for keyword in IN_PLACE:
                waiting += _parts(part, keyword)

    def _step(self, number: int = 1) -> None:
        self._num_steps += number
        if self._num_steps > MAX_STEPS:
            raise _TooManyStepsError

    def _target(self, schema: Schema) -> Schema | None:
        return _target(self._root, schema)


def iterate_schemas(root: Any) -> Iterator[Schema]:
    """All schemas of a document that are objects, each once. Values of `const`, `enum`, `default` and `examples` are
    none."""
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield schema
        waiting.append(_target(root, schema))
        for keyword in BY_NAME:
            named = schema.get(keyword)
            waiting += named.values() if isinstance(named, dict) else ()
        for keyword in LISTED:
            waiting += _parts(schema, keyword)
        waiting += [schema.get(keyword) for keyword in SINGLE]


def _target(root: Any, schema: Schema) -> Schema | None:
    """Returns the schema that `$ref` names within the document. None: there is no `$ref`, or it is not found."""
    found = resolve_reference(root, schema.get("$ref"))
    return found[1] if found is not None and isinstance(found[1], dict) else None


def resolve_reference(root: Any, reference: Any) -> tuple[Path, Any] | None:
    """Returns where in a document a reference such as `#/$defs/name` leads, and what is there. None: it is no reference
    within the document, or leads to nothing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    path: list[str | int] = []
    part = root
    for word in unquote(reference[1:]).split("/")[1:]:
        step: str | int = word.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and word.isdecimal() and int(word) < len(part):
            step = int(word)
        elif not (isinstance(part, dict) and step in part):
            return None
        path.append(step)
        part = part[step]
    return tuple(path), part


def _describes(schema: Schema) -> bool:
    return isinstance(schema.get("properties"), dict) or _says_otherwise(schema)


def _says_otherwise(schema: Schema) -> bool:
    return any(keyword in schema for keyword in SAYS_OTHERWISE)


def _parts(schema: Schema, keyword: str) -> list[Schema]:
    value = schema.get(keyword)
    return [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []
