"""The OpenAPI document: what FastAPI makes of the routes, with the models that it does not know of put into place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ratoon.version import __version__

TITLE = "Ratoon"
DESCRIPTION = "OpenAI's protocol and some extensions. Fields that OpenAI does not have are ordinary fields here."
API_KEY = {"type": "http", "scheme": "bearer", "description": "An API key of this server"}
ADMIN_KEY = {"type": "http", "scheme": "bearer", "description": "The admin key of this server"}


def build_document(
    app: FastAPI, needs_key: bool, open_paths: frozenset[str], is_admin_path: Callable[[str], bool], model: str
) -> dict[str, Any]:
    """`model` is the name that examples call it by."""
    document = get_openapi(title=TITLE, version=__version__, description=DESCRIPTION, routes=app.routes)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemes: dict[str, Any] = {}
    for path, operations in document["paths"].items():
        if is_admin_path(path):
            scheme, schemes["adminKey"] = "adminKey", ADMIN_KEY
        elif needs_key and path not in open_paths:
            scheme, schemes["key"] = "key", API_KEY
        else:
            scheme = ""
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own way to say no, which never leaves this server
            if scheme:
                operation["security"] = [{scheme: []}]
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model":
                    parameter["example"] = model
            for content in operation.get("requestBody", {}).get("content", {}).values():
                if "model" in content.get("example", {}):
                    content["example"] = {**content["example"], "model": model}
            for place in (operation.get("requestBody", {}), *operation["responses"].values()):
                for content in place.get("content", {}).values():
                    content["schema"] = _move(content["schema"], schemas)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    if schemes:
        components["securitySchemes"] = schemes
    return document


def _move(schema: Any, schemas: dict[str, Any]) -> Any:
    """A model's schema comes with its parts inside; the document has one place for all of them. What stays is a
    reference."""
    if isinstance(schema, list):
        return [_move(part, schemas) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "title" in schema and "properties" in schema:
        schemas.update(schema.pop("$defs", {}))
        schemas[schema["title"]] = schema
        return {"$ref": f"#/components/schemas/{schema['title']}"}
    return {key: _move(part, schemas) for key, part in schema.items()}
