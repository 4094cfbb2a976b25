"""The command-line options of structured output, as a StructuredOutput or as fields of a request."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratoon.api.parser import leave_out
from ratoon.core.errors import RequestError

if TYPE_CHECKING:
    from ratoon.core.structured import StructuredOutput

# Named as the fields of StructuredOutput that they fill
OPTIONS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
NAMES_OF_FILES = ("json_schema", "grammar", "structural_tag")


def add_structured_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured output (one of them)")
    group.add_argument("--json-schema", metavar="FILE", help="the answer is JSON that matches the schema")
    group.add_argument("--json-object", action="store_true", default=None, help="the answer is a JSON object")
    group.add_argument("--regex", metavar="REGEX", help="the answer matches this expression")
    group.add_argument("--choice", action="append", metavar="TEXT", help="the answer is this text; may be repeated")
    group.add_argument("--grammar", metavar="FILE", help="the answer matches this grammar (Lark or GBNF)")
    tag = group.add_argument(
        "--structural-tag", metavar="FILE", help="text with parts that match schemas: JSON with structures and triggers"
    )
    allow = group.add_argument(
        "--allow-additional-properties",
        action="store_true",
        default=None,
        help="objects may have properties that the schema does not name, unless it has additionalProperties",
    )
    leave_out(tag, allow)


def structured_output(args: argparse.Namespace) -> StructuredOutput | None:
    """RequestError for options that contradict each other and for values that have no meaning."""
    from ratoon.core.structured import StructuredOutput

    given = [name for name in OPTIONS if getattr(args, name, None) is not None]
    is_open = bool(getattr(args, "allow_additional_properties", None))
    if is_open and given[:1] not in (["json_schema"], ["structural_tag"]):
        option = _option("allow_additional_properties")
        raise RequestError(option, "has no meaning without a schema", "add --json-schema, or leave it out")
    if not given:
        return None
    if len(given) > 1:
        raise RequestError(_option(given[1]), f"contradicts {_option(given[0])}", "leave one of them out")
    name = given[0]
    value: Any = getattr(args, name)
    fields: dict[str, Any] = {name: _read(name, value) if name in NAMES_OF_FILES else value}
    asked = StructuredOutput(**fields, allow_additional_properties=is_open)
    try:
        asked.verify()
    except RequestError as error:
        raise RequestError(_option(name), error.problem, error.expected) from None
    return asked


def structured_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of a request body: OpenAI's where it has them, else vLLM's."""
    asked = structured_output(args)
    if asked is None:
        return {}
    # vLLM's name for the opposite, which both servers know.
    is_open = {"disable_additional_properties": False} if asked.allow_additional_properties else {}
    if asked.json_schema is not None and is_open:
        return {"structured_outputs": {"json": json.loads(asked.json_schema), **is_open}}
    if asked.json_schema is not None:
        schema = {"name": "answer", "schema": json.loads(asked.json_schema), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if asked.json_object:
        return {"response_format": {"type": "json_object"}}
    kind = asked.kind or ""
    return {"structured_outputs": {kind: getattr(asked, kind), **is_open}}


def check_structured_output(args: argparse.Namespace) -> None:
    """RequestError for a schema or grammar that no model can use, before one is loaded."""
    asked = structured_output(args)
    if asked is not None:
        from ratoon.engine.grammars.validator import validate

        validate(asked)


def fields_of_option(name: str) -> tuple[str, ...]:
    """What an option can be called in errors: fields of params, and of a request to a server."""
    if name not in OPTIONS:
        return ()
    of_server = [f"structured_outputs.{name.removesuffix('_schema')}"]  # its name for a schema is "json"
    if name in ("json_schema", "json_object"):
        of_server.append("response_format")
    return f"structured_output.{name}", "structured_output", *of_server


def _read(option: str, name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RequestError(_option(option), f"can't read {name}: {problem}", "the name of a file") from None


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
