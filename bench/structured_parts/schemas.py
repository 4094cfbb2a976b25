"""The schemas of structured.py: made ones of a given size, a hundred real ones, and those of JSON-Schema-Test-Suite."""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "string": {"type": "string", "maxLength": 12, "description": "A short text about the thing that is described."},
    "integer": {"type": "integer", "minimum": 0, "maximum": 500},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "list": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    "object": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "green", "blue", "yellow"]},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,8}-[0-9]{1,4}$"},
}
# Packages with pydantic models of requests and answers, as services have them.
PACKAGES = ("openai.types", "anthropic.types", "mcp.types", "agents")
NUM_REAL = 100
SMALLEST, LARGEST = 300, 20_000  # bytes of a real schema


def made_schema(seed: int, smallest: int = 1000) -> dict[str, Any]:
    """An object with fields of all kinds, of `smallest` bytes or some more."""
    choose = random.Random(seed)
    properties: dict[str, Any] = {}
    schema = {"type": "object", "properties": properties, "required": [], "additionalProperties": False}
    while len(json.dumps(schema)) < smallest:
        name = f"{choose.choice(('first', 'last', 'main', 'other'))}_{choose.choice(list(KINDS))}_{len(properties)}"
        properties[name] = KINDS[choose.choice(list(KINDS))]
        schema["required"] = list(properties)
    return schema


def real_schemas() -> list[dict[str, Any]]:
    """NUM_REAL cases without values, the same for the same versions of the packages."""
    found: dict[str, dict[str, Any]] = {}
    for package in PACKAGES:
        for schema in _schemas_of(package):
            text = json.dumps(schema)
            if SMALLEST <= len(text) <= LARGEST:
                found.setdefault(text, schema)
    texts = sorted(found)
    random.Random(0).shuffle(texts)
    return [{"schema": found[text], "tests": []} for text in texts[:NUM_REAL]]


def _schemas_of(package: str) -> Iterator[dict[str, Any]]:
    import pydantic

    try:
        root = importlib.import_module(package)
    except ImportError:
        return
    names = [package, *(found.name for found in pkgutil.walk_packages(getattr(root, "__path__", ()), f"{package}."))]
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception:  # modules that need further packages
            continue
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, pydantic.BaseModel) and value.__module__ == name:
                try:
                    yield value.model_json_schema()
                except Exception:  # types without a schema
                    continue


def suite_cases(folder: Path) -> list[dict[str, Any]]:
    """Of a draft's folder in JSON-Schema-Test-Suite: schemas, each with its valid and invalid values."""
    cases = []
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            tests = [{"data": test["data"], "valid": test["valid"]} for test in group["tests"]]
            cases.append({"schema": group["schema"], "tests": tests})
    return cases
