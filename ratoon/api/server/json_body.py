"""A request's body to a checked model: strict JSON, strict types, and no field that nobody reads.

Everything that can be wrong with a body is a 400 (or 415) that names the place.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from ratoon.api.server.context import context_of
from ratoon.api.server.errors import ApiError, refused
from ratoon.api.server.exchange import Scope, exchange_of, header
from ratoon.api.server.json_extent import ExtentLimit, check_extent
from ratoon.api.server.lanes import WorkLanes
from ratoon.api.server.protocol.base import RequestModel

Model = TypeVar("Model", bound=RequestModel)

HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")  # or one half of a whole one: worth a closer look
LONE_HALF = re.compile(  # of a text without escaped backslashes
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)
LONG_BODY = 16 * 1024  # bytes: what is shorter is read before a thread would have begun
# pydantic's kinds of errors in our words; those missing here speak for themselves.
PROBLEMS = {
    "missing": "is missing",
    "string_type": "is not text",
    "int_type": "is not a whole number",
    "int_parsing": "is not a whole number",  # from text, as forms have it
    "float_type": "is not a number",
    "float_parsing": "is not a number",
    "finite_number": "is not a finite number",
    "bool_type": "is neither true nor false",
    "bool_parsing": "is neither true nor false",
    "list_type": "is not a list",
    "dict_type": "is not an object",
    "model_type": "is not an object",
    "model_attributes_type": "is not an object",
}


_lanes = WorkLanes("body", LONG_BODY)


async def read_body(request: Request, model: type[Model]) -> Model:
    """The body as `model`. ApiError for anything that is not exactly that."""
    _check_content_type(request.scope)
    context, body = context_of(request), exchange_of(request.scope).body
    lenient = context.settings.lenient
    return await _lanes.run(len(body), lambda: parse_body(body, model, lenient, context.extent_limit))


def parse_body(body: bytes, model: type[Model], lenient: bool, limit: ExtentLimit) -> Model:
    """How much it holds is known before it is decoded, and what is wrong with it is found no more than once: a refusal
    costs no more than a few times the body, in time and in memory."""
    check_extent(body, limit)
    decoded = decode_json(body)
    if not isinstance(decoded, dict):
        raise ApiError(400, "The body is not a JSON object", code="invalid_json")
    fields = check_fields(decoded, model, lenient)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise explain(error) from None


def decode_json(body: bytes) -> Any:
    """JSON as the standard has it: no NaN, no key twice, whole characters only, and within reason."""
    if not body:
        raise _invalid_json("the body is empty")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid_json(f"byte {error.start} is not UTF-8") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise _invalid_json("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _invalid_json(f"{error.msg} at character {error.pos}") from None
    except ValueError:  # Python's limit on the length of a whole number
        raise _invalid_json("a number has too many digits") from None
    if HALF_CHARACTER.search(body):
        _check_whole_characters(body)
    return value


def _check_content_type(scope: Scope) -> None:
    # A web page can post other types to this server without asking it first.
    given = (header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if given != b"application/json" and not (given.startswith(b"application/") and given.endswith(b"+json")):
        raise ApiError(415, "The body must be JSON, with the header 'Content-Type: application/json'")
    if (header(scope, b"content-encoding") or b"identity").strip().lower() != b"identity":
        raise ApiError(415, "The body must not be compressed")


def check_fields(body: dict[str, Any], model: type[RequestModel], lenient: bool, path: str = "") -> dict[str, Any]:
    """The fields that the model has. The others are refused, each kind in its own words."""
    known = {}
    for name, value in body.items():
        if name in model.model_fields:
            inner = model.INNER.get(name)
            if inner is not None and isinstance(value, dict):
                value = check_fields(value, inner, lenient, f"{name}.")
            known[name] = value
        elif name in model.UNSUPPORTED:
            if value is not None:  # null means "left out"
                raise refused(name, "is not supported", model.UNSUPPORTED[name], code="unsupported_parameter")
        elif not lenient:
            raise _unknown_field(path, name, model)
    return known


def _unknown_field(path: str, name: str, model: type[RequestModel]) -> ApiError:
    shown = path + (name if len(name) <= 64 else name[:64] + "…")
    near = difflib.get_close_matches(name[:64], model.model_fields, n=1)
    expected = f"did you mean {near[0]}?" if near else "leave it out (ratoon serve --lenient ignores such fields)"
    return refused(shown, "is not a field of this request", expected, code="unknown_parameter")


def explain(error: ValidationError) -> ApiError:
    """What pydantic found wrong first, with its place."""
    problem = error.errors(include_url=False, include_input=False)[0]
    path = _path(problem["loc"])
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):  # one of our own validators
        return refused(path, str(cause))
    text = PROBLEMS.get(problem["type"])
    return refused(path, text or problem["msg"][:1].lower() + problem["msg"][1:])


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or "body"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _invalid_json(f"the key {twice[:64]!r} stands in one object twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid_json(f"{name} is no number in JSON")


def _check_whole_characters(body: bytes) -> None:
    """Escapes can write half a character (a lone surrogate), which no text can hold."""
    if LONE_HALF.search(body.replace(b"\\\\", b"__")):
        raise _invalid_json("an escape \\uD800 to \\uDFFF stands without its other half")


def _invalid_json(problem: str) -> ApiError:
    return ApiError(400, f"The body is not valid JSON: {problem}", code="invalid_json")
