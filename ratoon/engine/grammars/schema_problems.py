"""Why a JSON schema can't be used: the keyword, and the path to it.

Values of a wrong type, and what is not enforced, are found by a walk over the schema. What a grammar library refuses,
without a path, is found by trying parts of the schema by themselves. The library is passed as a function. What this
buys is no time but the message: the library's own names neither the keyword nor the place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ratoon.core.closed_objects import BY_NAME as MAPS
from ratoon.core.closed_objects import SINGLE, Path, resolve_reference

ProblemOf = Callable[[str], str | None]  # what a library says about the JSON text of a schema; None: it is usable

TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")  # at least one schema
PARTS = (*MAPS, *LISTS, *SINGLE)  # keywords with schemas
SIZES = (
    "maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength", "minProperties",
)  # fmt: skip
NUMBERS = ("maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum", "multipleOf")
TEXTS = ("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef", "$id", "$anchor", "$schema")
DEFINITIONS = ("$defs", "definitions")  # parts that only a $ref uses
GENERAL = ("type", "properties", "items")  # named last: a narrower keyword says more
MAX_STEPS = 128  # of a path
MAX_TRIALS = 400  # parts that are tried by themselves: about 0.2 ms each
MAX_SHOWN = 80  # characters of a value in a message

# Beginnings of the library's messages.
UNSATISFIABLE = "Unsatisfiable schema"
UNRESOLVED = ("Pointer ", "Resource ", "Anchor ")
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: \[(.*)\]")


@dataclass(frozen=True, slots=True)
class SchemaProblem:
    path: str  # a JSON pointer, from # on, to the schema with the keyword
    keyword: str | None  # None: the schema as a whole
    problem: str

    def __str__(self) -> str:
        where = f"at {self.path}" if self.keyword is None else f"{self.keyword!r} at {self.path}"
        return f"{where} {self.problem}"


def find_invalid(schema: Any) -> SchemaProblem | None:
    """The first keyword whose value has a wrong type. Unknown keywords are not checked: they mean nothing."""
    if schema is False:
        return SchemaProblem("#", None, "allows no value: it is false")
    for path, part in _walk(schema):
        if isinstance(part, bool):
            continue
        if len(path) > MAX_STEPS:
            return SchemaProblem(_pointer(path[:4]) + "/…", None, "is nested too deeply")
        if not isinstance(part, dict):
            return SchemaProblem(_pointer(path), None, f"is neither an object nor a boolean: {_shown(part)}")
        for keyword, value in part.items():
            expected = _expected(keyword, value)
            if expected is not None:
                return SchemaProblem(_pointer(path), keyword, f"is {_shown(value)}, not {expected}")
    return None


def find_unenforced(schema: Any) -> SchemaProblem | None:
    """What the library accepts although texts need not match it, or never end."""
    references: dict[str, tuple[Path, Any]] = {}
    for path, part in _walk(schema):
        if not isinstance(part, dict):
            continue
        least, required = part.get("minProperties", 0), part.get("required", [])
        if least > max(1, len(set(required))):  # in JSON a name may come twice
            return SchemaProblem(_pointer(path), "minProperties", "is not supported above 1 and the required names")
        reference = part.get("$ref", "")
        if (target := resolve_reference(schema, reference)) is not None:
            references[reference] = target
    return _find_endless(schema, references)


def _find_endless(schema: Any, references: Mapping[str, tuple[Path, Any]]) -> SchemaProblem | None:
    """A reference of which every value would hold another one, for ever; where the whole schema is no better."""
    finite: set[str] = set()
    while found := {name for name in references.keys() - finite if _is_finite(references[name][1], finite)}:
        finite |= found
    if len(finite) == len(references) or _is_finite(schema, finite):
        return None
    path = next(path for name, (path, _) in references.items() if name not in finite)
    return SchemaProblem(_pointer(path), None, "allows no value: it would have to contain itself, for ever")


def _is_finite(part: Any, references: Collection[str]) -> bool:
    """Whether there may be a value that ends, given the references that have one."""
    if not isinstance(part, dict) or "const" in part or "enum" in part:
        return True
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and reference not in references:
        return False
    if not all(_is_finite(inner, references) for inner in part.get("allOf", ())):
        return False
    for several in ("anyOf", "oneOf"):
        if several in part and not any(_is_finite(inner, references) for inner in part[several]):
            return False
    if part.get("type") == "object":
        properties = part.get("properties", {})
        return all(_is_finite(properties.get(name), references) for name in part.get("required", ()))
    if part.get("type") == "array" and not isinstance(part.get("items"), list):
        least, first = part.get("minItems", 0), part.get("prefixItems", [])
        items = [*first[:least], *([part.get("items")] if least > len(first) else [])]
        return all(_is_finite(inner, references) for inner in items)
    return True


def locate(schema: Any, problem: str, problem_of: ProblemOf) -> SchemaProblem:
    """Where a problem comes from that the library found in a whole schema."""
    search = _Search(schema, problem_of)
    path, part, problem = _unresolved(schema, problem) or search.deepest((), schema, _short(problem))
    keyword = search.keyword_of(part, problem)
    return SchemaProblem(_pointer(path), keyword, _explain(problem, keyword))


class _Search:
    def __init__(self, root: Any, problem_of: ProblemOf) -> None:
        self._root = root
        self._problem_of = problem_of
        self._definitions = {} if not isinstance(root, dict) else {key: root[key] for key in DEFINITIONS if key in root}
        self._num_trials = 0

    def deepest(self, path: Path, part: Any, problem: str) -> tuple[Path, Any, str]:
        """The smallest part with the problem."""
        seen = {path}
        while isinstance(part, dict):
            for child_path, child in self._parts_of(path, part):
                if child_path in seen:
                    continue
                seen.add(child_path)
                found = self._cause(path, part, problem, child_path, child)
                if found is not None:
                    path, part, problem = child_path, child, found
                    break
            else:
                break
        return path, part, problem

    def keyword_of(self, part: Any, problem: str) -> str | None:
        """The keyword that the message names, else one without which the problem is gone."""
        if not isinstance(part, dict):
            return None
        if problem.startswith(UNRESOLVED) and "$ref" in part:
            return "$ref"
        unknown = _UNKNOWN_KEYWORDS.search(problem)
        if unknown is not None:
            return str(json.loads(f"[{unknown[1]}]")[0])
        names = problem.replace("min/maxProperties", "minProperties maxProperties")
        named = [keyword for keyword in part if re.search(rf"(?<![\w\"]){re.escape(keyword)}\b", names)]
        for keyword in [*named, *sorted(part, key=GENERAL.__contains__)]:
            rest = {key: value for key, value in part.items() if key != keyword}
            if keyword not in DEFINITIONS and self._try(rest) != problem:
                return keyword
        return named[0] if named else None

    def _parts_of(self, path: Path, part: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
        target = resolve_reference(self._root, part.get("$ref"))
        if target is not None:
            yield target
        yield from _children(path, part, ("properties", "patternProperties", *LISTS, "items", "additionalProperties"))

    def _cause(self, path: Path, part: dict[str, Any], problem: str, child_path: Path, child: Any) -> str | None:
        """The child's problem, if it is the cause of the problem of `part`. A child that can't be satisfied need not
        be: an optional property may be excluded."""
        found = None if isinstance(child, bool) else self._try(child)
        if found is None:
            return None
        if not problem.startswith(UNSATISFIABLE):
            return found if found == problem else None
        if not found.startswith(UNSATISFIABLE):
            return None
        is_reference = child_path[: len(path)] != path or len(child_path) == len(path)
        return found if is_reference or self._try(_replaced(part, child_path[len(path) :])) != problem else None

    def _try(self, part: Any) -> str | None:
        self._num_trials += 1
        if self._num_trials > MAX_TRIALS:
            return None
        document = {**self._definitions, **part} if isinstance(part, dict) else part
        problem = self._problem_of(json.dumps(document))
        return None if problem is None else _short(problem)


def _short(problem: str) -> str:
    """Returns a problem without the library's notes of the reference that it followed last."""
    return re.split(r"\s*while processing ", problem)[0]


def _unresolved(schema: Any, problem: str) -> tuple[Path, Any, str] | None:
    """The part with a reference to something that is not in the document."""
    if not problem.startswith(UNRESOLVED):
        return None
    for path, part in _walk(schema):
        reference = part.get("$ref") if isinstance(part, dict) else None
        if isinstance(reference, str) and f"'{reference.removeprefix('#')}'" in problem:
            return path, part, problem
    return None


def _walk(schema: Any) -> Iterator[tuple[Path, Any]]:
    """All schemas in it, itself first."""
    waiting: list[tuple[Path, Any]] = [((), schema)]
    while waiting:
        path, part = waiting.pop()
        yield path, part
        if isinstance(part, dict):
            waiting.extend(reversed(list(_children(path, part, PARTS))))


def _children(path: Path, part: Mapping[str, Any], keywords: tuple[str, ...]) -> Iterator[tuple[Path, Any]]:
    if part.keys().isdisjoint(keywords):
        return
    for keyword in keywords:
        value = part.get(keyword)
        if value is None:
            continue
        if keyword in MAPS and isinstance(value, dict):
            yield from (((*path, keyword, name), child) for name, child in value.items())
        elif isinstance(value, list) and keyword in (*LISTS, "items"):
            yield from (((*path, keyword, index), child) for index, child in enumerate(value))
        elif keyword in SINGLE:
            yield (*path, keyword), value


def _expected(keyword: str, value: Any) -> str | None:
    """What a keyword's value should be, if it is not."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if keyword == "type":
        names = value if isinstance(value, list) else [value]
        return None if names and all(name in TYPES for name in names) else f"one or several of {', '.join(TYPES)}"
    if keyword in MAPS:
        return None if isinstance(value, dict) else "an object of schemas"
    if keyword in LISTS:
        return None if isinstance(value, list) and value else "a list of one schema or more"
    if keyword in SINGLE:
        is_list = keyword == "items" and isinstance(value, list)  # of drafts up to 7
        return None if isinstance(value, dict | bool) or is_list else "a schema"
    if keyword in SIZES:
        return None if is_number and value >= 0 and value == int(value) else "a whole number of at least 0"
    if keyword in NUMBERS:
        is_switch = isinstance(value, bool) and keyword.startswith("exclusive")  # of draft 4
        above = keyword != "multipleOf" or (is_number and value > 0)
        return None if (is_number and above) or is_switch else "a number" + (" above 0" if not above else "")
    if keyword in TEXTS:
        return None if isinstance(value, str) else "text"
    if keyword == "required":
        is_texts = isinstance(value, list) and all(isinstance(name, str) for name in value)
        is_switch = isinstance(value, bool)  # of draft 3
        return None if is_texts and not is_switch else "a list of names"
    if keyword == "enum":
        return None if isinstance(value, list) and value else "a list of one value or more"
    if keyword == "uniqueItems":
        return None if isinstance(value, bool) else "true or false"
    return None


def _replaced(part: Any, path: Path) -> Any:
    """A copy in which the schema at `path` accepts anything."""
    if not path:
        return True
    copy: Any = dict(part) if isinstance(part, dict) else list(part)
    copy[path[0]] = _replaced(copy[path[0]], path[1:])
    return copy


def _explain(problem: str, keyword: str | None) -> str:
    if _UNKNOWN_KEYWORDS.search(problem):
        return "is not supported"
    if problem.startswith(UNSATISFIABLE):
        reason = problem.removeprefix(UNSATISFIABLE).removeprefix(": ")
        if reason.startswith("Regex is empty"):
            return "allows no text"
        return f"allows no value: {_one_line(reason)}"
    if problem.startswith(UNRESOLVED):
        return "refers to nothing in this schema; references to other documents are not followed"
    if keyword in ("pattern", "patternProperties"):
        _, _, reason = problem.rpartition("error: ")
        return f"is not a supported regular expression: {_one_line(reason)}"
    if problem.startswith("Unknown format"):
        return f"is not supported: {_one_line(problem.lower())}"
    if problem.startswith("oneOf constraints are not supported"):
        return "is not supported where a value could match several of its schemas; use 'anyOf'"
    return f"can't be used: {_one_line(problem)}"


def _pointer(path: Path) -> str:
    return "#" + "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in path)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 4 * MAX_SHOWN else line[: 4 * MAX_SHOWN] + "…"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"
