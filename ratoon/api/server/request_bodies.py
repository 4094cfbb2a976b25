"""A request's body to a checked model: strict JSON or a form, and strict types.

Every error in a body is a 400 (or 415) that names the place. FastAPI could read bodies itself, but accepts NaN,
duplicate keys, lone surrogates and misspelt fields, and has no limits on the contents. What becomes of fields that a
request does not have is decided in unknown_fields.py.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header
from starlette.requests import Request

from ratoon.api.server.context import context_of
from ratoon.api.server.errors import ApiError, refused
from ratoon.api.server.exchange import Scope, exchange_of, header
from ratoon.api.server.protocol.base import RequestModel
from ratoon.api.server.threads import WorkLanes
from ratoon.api.server.unknown_fields import FieldFilter, header_value
from ratoon.core.json_extent import ExtentLimit, find_excess

Model = TypeVar("Model", bound=RequestModel)

HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")  # or one half of a valid pair: needs a full check
LONE_HALF = re.compile(  # of a text without escaped backslashes
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)
LONG_BODY = 16 * 1024  # bytes: a shorter body is read faster than a thread starts

_lanes = WorkLanes("body", LONG_BODY)


async def read_body(request: Request, model: type[Model]) -> Model:
    """Returns the body as `model`. ApiError for anything that is not exactly that."""
    _check_content_type(request.scope)
    context, exchange = context_of(request), exchange_of(request.scope)
    body, exchange.body = exchange.body, b""  # its contents are kept, and not the text as well
    filter = _field_filter(request)
    work = partial(parse_body, body, model, filter, context.extent_limit)
    del body
    asked = await _lanes.run(exchange.body_size, work)
    _report_ignored(request, filter)
    return asked


def parse_body(body: bytes, model: type[Model], filter: FieldFilter, limit: ExtentLimit) -> Model:
    """The number of values is known before decoding, and only the first error is reported: a refusal
    costs at most a few times the body, in time and in memory."""
    excess = find_excess(body, limit)
    if excess is not None:
        raise ApiError(400, f"The body has more than {excess}, which no request needs", code="body_too_large")
    decoded = decode_json(body)
    if not isinstance(decoded, dict):
        raise ApiError(400, "The body is not a JSON object", code="invalid_json")
    return _validate(decoded, model, filter)


def _validate(body: dict[str, Any], model: type[Model], filter: FieldFilter) -> Model:
    try:
        made = model.model_validate(filter.fields_of(body, model))
        made.note_model_of(body)
        return made
    except ValidationError as error:
        raise explain_first(error) from None


def _field_filter(request: Request) -> FieldFilter:
    """The server has one model, so a request need not name it."""
    context = context_of(request)
    return FieldFilter(context.settings.unknown_fields, {"model": context.served_names[0]})


def _report_ignored(request: Request, filter: FieldFilter) -> None:
    if filter.ignored:
        exchange_of(request.scope).ignored_fields = header_value([*filter.ignored])
        context_of(request).ignored_fields.note([*filter.ignored])


def decode_json(body: bytes) -> Any:
    """Decodes strict JSON: no NaN, no duplicate keys, no lone surrogates, limited nesting."""
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
        raise _invalid_json(f"{error.msg.removesuffix(' at')} at character {error.pos}") from None
    except ValueError:  # Python's limit on the length of an integer
        raise _invalid_json("a number has too many digits") from None
    if HALF_CHARACTER.search(body):
        _check_whole_characters(body)
    return value


def _check_content_type(scope: Scope) -> None:
    # A web page can post other types to this server without a preflight.
    given = (header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if given != b"application/json" and not (given.startswith(b"application/") and given.endswith(b"+json")):
        raise ApiError(415, "The body must be JSON, with the header 'Content-Type: application/json'")
    if (header(scope, b"content-encoding") or b"identity").strip().lower() != b"identity":
        raise ApiError(415, "The body must not be compressed")


def explain_first(error: ValidationError) -> ApiError:
    """Returns the first of pydantic's errors."""
    return explain(error.errors(include_url=False, include_input=False)[0])


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _invalid_json(f"the key {twice[:64]!r} occurs twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid_json(f"{name} is not a number in JSON")


def _check_whole_characters(body: bytes) -> None:
    """Escapes can encode half a character (a lone surrogate), which is not valid text."""
    if LONE_HALF.search(body.replace(b"\\\\", b"__")):
        raise _invalid_json("an escape \\uD800 to \\uDFFF is not part of a surrogate pair")


def _invalid_json(problem: str) -> ApiError:
    return ApiError(400, f"The body is not valid JSON: {problem}", code="invalid_json")


# ---- forms ----
# Values are text, from which numbers and booleans are parsed. An empty one counts as left out. The parser is
# python-multipart's; Starlette's, built on it, writes files to disk and accepts incomplete forms.

FORM = "multipart/form-data"
MAX_PARTS = 64
MAX_FIELD_BYTES = 2**20  # of a part that is not a file
LIST = "[]"  # at the end of a name: it may come several times


async def read_form(request: Request, model: type[Model]) -> Model:
    """Returns a form as `model`. Files are its fields of type bytes."""
    _check_origin(request.scope, context_of(request).settings.cors_origins)
    boundary = _boundary(request.scope)
    exchange = exchange_of(request.scope)
    # A recording is large: parsing takes time, and the second copy should be freed immediately after it.
    work = partial(parse_form, exchange.body, boundary)
    exchange.body = b""
    fields = await asyncio.to_thread(work)
    del work
    filter = _field_filter(request)
    asked = _validate(fields, model, filter)
    _report_ignored(request, filter)
    return asked


def parse_form(body: bytes, boundary: bytes) -> dict[str, Any]:
    """Returns a form's values by name: files as bytes, other values as text, or as a list of texts where the name ends
    with []."""
    form = _Form()
    config = {"MAX_MEMORY_FILE_SIZE": float("inf"), "UPLOAD_ERROR_ON_BAD_CTE": True}
    try:
        parser = FormParser(FORM, form.add_field, form.add_file, form.end, boundary=boundary, config=config)
        parser.write(body)
        parser.finalize()
    except FormParserError:
        raise _invalid_form("its parts are not valid multipart/form-data") from None
    if not form.ended:
        raise _invalid_form("it is incomplete")
    return form.values


class _Form:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.ended = False
        self._num_parts = 0

    def add_field(self, field: Field) -> None:
        name, data = _text(field.field_name or b"", "a name"), field.value or b""
        if len(data) > MAX_FIELD_BYTES:
            raise refused(name[:64], f"has {len(data)} bytes", "send a file with a filename")
        value = _text(data, name)
        if not value:
            return
        if name.endswith(LIST):
            self._count()
            self.values.setdefault(name.removesuffix(LIST), []).append(value)
        else:
            self._add(name, value)

    def add_file(self, file: File) -> None:
        file.file_object.seek(0)
        self._add(_text(file.field_name or b"", "a name"), file.file_object.read())

    def end(self) -> None:
        self.ended = True

    def _add(self, name: str, value: str | bytes) -> None:
        self._count()
        if name in self.values:
            raise refused(name[:64], "occurs twice", "once")
        self.values[name] = value

    def _count(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _invalid_form(f"it has more than {MAX_PARTS} parts")


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise refused(name[:64], "is not UTF-8", "text; send a file with a filename") from None


def _boundary(scope: Scope) -> bytes:
    kind, options = parse_options_header(header(scope, b"content-type"))
    if kind.lower() != FORM.encode() or not options.get(b"boundary"):
        raise ApiError(415, f"The body must be a form, with the header 'Content-Type: {FORM}; boundary=…'")
    return options[b"boundary"]


def _check_origin(scope: Scope, allowed: tuple[str, ...]) -> None:
    """A web page can post forms to any server without a preflight. Those of other origins are refused here."""
    origin = (header(scope, b"origin") or b"").decode("latin-1")
    if not origin or origin in allowed or "*" in allowed:
        return
    if urlsplit(origin).netloc != (header(scope, b"host") or b"").decode("latin-1"):
        raise ApiError(403, "Web pages of this origin are not allowed (--cors-origin)", code="origin_refused")


def _invalid_form(problem: str) -> ApiError:
    return ApiError(400, f"The body is not a valid form: {problem}", code="invalid_form")


# ---- error messages for users: pydantic's are for programmers ----

PROBLEMS = {
    "missing": "is missing",
    "string_type": "is not text",
    "int_type": "is not a whole number",
    "int_parsing": "is not a whole number",  # from text, as forms have it
    "int_parsing_size": "is out of range",
    "int_from_float": "is not a whole number",
    "float_type": "is not a number",
    "float_parsing": "is not a number",
    "finite_number": "is not a finite number",
    "bool_type": "is neither true nor false",
    "bool_parsing": "is neither true nor false",
    "bytes_type": "is not a file",
    "list_type": "is not a list",
    "dict_type": "is not an object",
    "model_type": "is not an object",
    "model_attributes_type": "is not an object",
}
# With the bound from the error's context.
RANGES = {
    "greater_than_equal": "is out of range; at least {ge}",
    "greater_than": "is out of range; more than {gt}",
    "less_than_equal": "is out of range; at most {le}",
    "less_than": "is out of range; less than {lt}",
    "string_too_short": "is too short; at least {min_length} characters",
    "string_too_long": "is too long; at most {max_length} characters",
    "too_short": "has too few entries; at least {min_length}",
    "too_long": "has too many entries; at most {max_length}",
    "literal_error": "is unknown; {expected}",
    "enum": "is unknown; {expected}",
}
OTHERWISE = "is not valid"


def explain(problem: Mapping[str, Any]) -> ApiError:
    """Returns one of pydantic's errors, with its place."""
    path = _path(problem["loc"])
    context = problem.get("ctx", {})
    if isinstance(context.get("error"), ValueError):  # one of our own validators
        return refused(path, str(context["error"]))
    kind = problem["type"]
    if kind in RANGES:
        return refused(path, *RANGES[kind].format(**context).split("; ", 1))
    return refused(path, PROBLEMS.get(kind, OTHERWISE))


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or "body"
