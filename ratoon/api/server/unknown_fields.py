"""Fields of a body that a request does not have.

Clients written for other servers send fields of those, which are ignored and reported: in a header of the answer, and
once in the log. A name that looks like a misspelt one is refused, since ignoring it would silently change the answer,
and so is a field that is known to constrain answers elsewhere (`UNSUPPORTED` of a RequestModel).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from ratoon.api.server.errors import ApiError, refused
from ratoon.api.server.protocol.base import RequestModel, find_hint
from ratoon.api.server.settings import UnknownFields
from ratoon.core.suggestions import nearest_name
from ratoon.observe.logging import get_logger

MAX_SHOWN_NAME = 64
MAX_IGNORED = 64  # unknown fields of a request: each is compared with all known names
MAX_REPORTED = 16  # of them in the header
MAX_LOGGED = 256  # names, while the server runs
INDEX = re.compile(r"\[\d+\]")
UNKNOWN = "is not a field of this request"

logger = get_logger(__name__)


class FieldFilter:
    """Takes the known fields out of one body. `ignored` are the others that the policy allows."""

    def __init__(self, policy: UnknownFields, defaults: Mapping[str, Any] | None = None) -> None:
        """`defaults` are values of fields that a body may leave out, for models that have them."""
        self._policy = policy
        self._defaults = defaults or {}
        self._num_unknown = 0
        self.ignored: dict[str, None] = {}  # paths, each once

    def fields_of(self, body: Mapping[str, Any], model: type[RequestModel]) -> dict[str, Any]:
        """Returns the known fields. ApiError for a field that is refused."""
        known = self._known(body, model, "")
        for name, value in self._defaults.items():
            if name in model.body_fields() and known.get(name) is None:
                known[name] = value
        return known

    def _known(self, body: Mapping[str, Any], model: type[RequestModel], path: str) -> dict[str, Any]:
        known = {}
        fields, inner = model.body_fields(), model.inner_models()
        for name, value in body.items():
            if name in fields:
                known[name] = self._inside(value, inner[name], path + name) if name in inner else value
            elif (hint := find_hint(model.UNSUPPORTED, name)) is not None:
                if not model.is_harmless(name, value):
                    raise refused(path + _shorten(name), "is not supported", hint, code="unsupported_parameter")
            elif value is not None:  # null means "left out"
                self._take_unknown(name, model, path)
        return known

    def _inside(self, value: Any, model: type[RequestModel], path: str) -> Any:
        """Returns the value of a field that is a model, or a list of models. Wrong types are left to the model."""
        if isinstance(value, dict):
            return self._known(value, model, f"{path}.")
        if isinstance(value, list):
            return [
                self._known(entry, model, f"{path}[{index}].") if isinstance(entry, dict) else entry
                for index, entry in enumerate(value)
            ]
        return value

    def _take_unknown(self, name: str, model: type[RequestModel], path: str) -> None:
        if self._policy is not UnknownFields.IGNORE:
            self._num_unknown += 1
            meant = _meant(name, model)
            if meant is not None:
                raise refused(path + _shorten(name), UNKNOWN, f"did you mean {meant}?", code="unknown_parameter")
            if self._policy is UnknownFields.REFUSE:
                expected = "leave it out (this server was started with --strict)"
                raise refused(path + _shorten(name), UNKNOWN, expected, code="unknown_parameter")
            if self._num_unknown > MAX_IGNORED:
                problem = f"has more than {MAX_IGNORED} fields that are unknown, {_shorten(name)!r} among them"
                raise ApiError(400, f"The body {problem}; leave them out", code="unknown_parameter")
        if len(self.ignored) < MAX_REPORTED:
            self.ignored[INDEX.sub("[]", path) + _shorten(name)] = None


class IgnoredFieldsLog:
    """Writes a line to the log for each name that was ignored, once."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def note(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._names and len(self._names) < MAX_LOGGED:
                self._names.add(name)
                logger.warning("requests have the field %r, which is unknown and ignored (logged once)", name)


def header_value(names: Sequence[str]) -> str:
    """Returns names as text of a header. Other characters than those of usual names are written as in a URL."""
    return ", ".join(quote(name, safe="._-[]$@:/") for name in names)


@lru_cache(4096)
def _meant(name: str, model: type[RequestModel]) -> str | None:
    return None if name in model.ELSEWHERE else nearest_name(name, model.body_fields())


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_SHOWN_NAME else name[:MAX_SHOWN_NAME] + "…"
