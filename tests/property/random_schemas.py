"""Random JSON schemas, from a seed: all keywords that are enforced, in combinations that may be unsatisfiable."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any] | bool

NAMES = ("a", "b", "long name", 'q"t', "ü", "$x", "c3")
VALUES = (None, True, 0, -3, 1.5, "", "a", 'x"y', "ü", [], [1, "a"], {}, {"a": [None]})
PATTERNS = ("^[a-c]+$", "^a", "[0-9]{2}", "^(x|yz)*$", "^$", "b")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
NAME_PATTERNS = ("^a", "[0-9]$", "^[a-z ]+$")
TYPES = ("null", "boolean", "string", "integer", "number", "object", "array")


def random_schema(random: Random, depth: int = 3, objects: bool = True) -> Schema:
    """`objects`: whether there may be schemas of objects."""
    makers = LEAVES if depth == 0 else LEAVES + ARRAYS * 2 + (OBJECTS * 2 if objects else ())
    return random.choice(makers)(random, lambda: random_schema(random, depth - 1, objects), objects)


Inner = Callable[[], Schema]


def _some(random: Random, **optional: Callable[[], Any]) -> dict[str, Any]:
    """Each of them with a chance of one half."""
    return {name.rstrip("_"): make() for name, make in optional.items() if random.random() < 0.5}


def _typed(random: Random, inner: Inner, objects: bool) -> Schema:
    types = TYPES if objects else tuple(name for name in TYPES if name != "object")
    return {"type": random.choice(types) if random.random() < 0.5 else random.sample(types, random.randint(1, 3))}


def _string(random: Random, inner: Inner, objects: bool) -> Schema:
    return {"type": "string", **_some(random, minLength=lambda: random.randint(0, 3), maxLength=lambda: 3)}


def _pattern(random: Random, inner: Inner, objects: bool) -> Schema:
    return {"type": "string", "pattern": random.choice(PATTERNS), **_some(random, maxLength=lambda: 9)}


def _format(random: Random, inner: Inner, objects: bool) -> Schema:
    return {"type": "string", "format": random.choice(FORMATS)}


def _number(random: Random, inner: Inner, objects: bool) -> Schema:
    whole = random.random() < 0.5
    limits = {
        name: random.randint(-20, 20) / random.choice((1, 2))
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        if random.random() < 0.25
    }
    steps = (1, 2, 3, 7) if whole else (0.5, 2, 0.1)
    step = {"multipleOf": random.choice(steps)} if random.random() < 0.25 else {}
    return {"type": "integer" if whole else "number", **limits, **step}


def _enum(random: Random, inner: Inner, objects: bool) -> Schema:
    return {"enum": [random.choice(_values(objects)) for _ in range(random.randint(1, 4))]}


def _const(random: Random, inner: Inner, objects: bool) -> Schema:
    return {"const": random.choice(_values(objects))}


def _values(objects: bool) -> tuple[Any, ...]:
    return VALUES if objects else tuple(value for value in VALUES if not isinstance(value, dict))


def _switch(random: Random, inner: Inner, objects: bool) -> Schema:
    return True if objects else {"type": "boolean"}


def _list(random: Random, inner: Inner, objects: bool) -> Schema:
    sizes = _some(random, minItems=lambda: random.randint(0, 2), maxItems=lambda: random.randint(1, 4))
    return {"type": "array", "items": inner(), **sizes}


def _tuple(random: Random, inner: Inner, objects: bool) -> Schema:
    first = [inner() for _ in range(random.randint(1, 3))]
    rest = _some(random, items=lambda: random.choice((True, False, inner())), minItems=lambda: random.randint(0, 4))
    if not objects:
        rest["items"] = False
    return {"type": "array", "prefixItems": first, **rest}


def _any_of(random: Random, inner: Inner, objects: bool) -> Schema:
    return {"anyOf": [inner() for _ in range(random.randint(1, 3))]}


def _all_of(random: Random, inner: Inner, objects: bool) -> Schema:
    return {"allOf": [inner() for _ in range(random.randint(1, 2))]}


def _one_of(random: Random, inner: Inner, objects: bool) -> Schema:
    return {"oneOf": [inner() for _ in range(random.randint(1, 3))]}


def _object(random: Random, inner: Inner, objects: bool) -> Schema:
    names = random.sample(NAMES, random.randint(1, 4))
    more = _some(
        random,
        required=lambda: random.sample(names, random.randint(0, len(names))),
        additionalProperties=lambda: random.choice((True, False, inner())),
    )
    typed = {"type": "object"} if random.random() < 0.9 else {}
    return {**typed, "properties": {name: inner() for name in names}, **more}


def _map(random: Random, inner: Inner, objects: bool) -> Schema:
    sizes = _some(random, minProperties=lambda: random.randint(0, 2), maxProperties=lambda: random.randint(1, 3))
    return {"type": "object", "additionalProperties": inner(), **sizes}


def _patterned(random: Random, inner: Inner, objects: bool) -> Schema:
    names = random.sample(NAMES, 2)
    more = _some(
        random,
        properties=lambda: {name: inner() for name in names},
        required=lambda: names[:1],
        additionalProperties=lambda: random.choice((False, inner())),
    )
    return {"type": "object", "patternProperties": {random.choice(NAME_PATTERNS): inner()}, **more}


def _referring(random: Random, inner: Inner, objects: bool) -> Schema:
    """A tree of itself: the reference is from the document's root, so this is used there alone."""
    node = {"type": "object", "properties": {"value": inner(), "next": {"$ref": "#/$defs/node"}}, "required": ["value"]}
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


Maker = Callable[[Random, Inner, bool], Schema]
LEAVES: tuple[Maker, ...] = (_typed, _string, _pattern, _format, _number, _number, _enum, _const, _switch)
ARRAYS: tuple[Maker, ...] = (_list, _tuple, _any_of, _all_of, _one_of)
OBJECTS: tuple[Maker, ...] = (_object, _object, _map, _patterned)


def random_document(random: Random) -> Schema:
    """A whole schema; now and then a recursive one."""
    if random.random() < 0.05:
        return _referring(random, lambda: random_schema(random, 1), True)
    return random_schema(random)
