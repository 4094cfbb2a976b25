"""A setting: its name, help, default and check, declared once, as the field of a config that holds its value.

Keywords of LLM and AsyncLLM (core/settings.py), options of the command line (api/options.py) and the tables of
docs/settings.md are made from these declarations. A new setting is a new field with `setting(…)`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from ratoon.core.errors import ConfigError
from ratoon.core.sizes import parse_size


class Check(NamedTuple):
    """Which values are valid; None is always valid for an optional setting."""

    accepts: Callable[[Any], bool]
    expected: str
    problem: str = "is out of range"


def at_least(low: int) -> Check:
    return Check(lambda value: _is_whole(value) and value >= low, f"a whole number of at least {low}")


def whole_between(low: int, high: int) -> Check:
    return Check(lambda value: _is_whole(value) and low <= value <= high, f"{low} to {high}")


def number(accepts: Callable[[float], bool], expected: str) -> Check:
    """NaN is never accepted."""
    return Check(lambda value: _is_number(value) and not math.isnan(value) and accepts(value), expected)


def one_of(*names: str) -> Check:
    return Check(lambda value: value in names, f"{', '.join(names[:-1])} or {names[-1]}", "is unknown")


# Of settings that are objects
EXAMPLES = {
    "rope_scaling": '{"rope_type": "yarn", "factor": 4.0}',
    "hf_overrides": '{"max_position_embeddings": 4096}',
    "adapters": '{"sql": "/adapters/sql"}',
    "kv_connector_options": '{"folder": "/var/cache/kv"}',
    "limit_mm_per_prompt": '{"image": 4, "video": 0}',
    "mm_processor_kwargs": '{"max_pixels": 1003520}',
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 5}',
}
ABOVE_ZERO_TO_ONE = number(lambda value: 0 < value <= 1, "above 0 and at most 1")
SECONDS = number(lambda value: 0 <= value < math.inf, "a number of seconds")


@dataclass(frozen=True, slots=True)
class Setting:
    field: str  # of the config
    name: str  # the keyword; on the command line with hyphens
    help: str
    default: Any
    kind: type  # int, float, str, bool, dict (JSON), tuple (of texts), or an Enum
    optional: bool = False  # None: resolved later
    check: Check | None = None
    size: bool = False  # bytes, also as text such as 2GiB
    options: tuple[str, ...] = ()  # of the command line, besides the one derived from the name
    metavar: str | None = None
    group: str | None = None  # of options on the command line

    def parse(self, value: Any) -> Any:
        """Convert a value given in Python or on the command line. Raises ConfigError if it is invalid."""
        if value is None and self.optional:
            return None
        if self.size:
            return parse_size(self.name, value, least=0 if self.default == 0 else 1)
        if self.kind is dict:
            return json_object(self.name, value)
        if issubclass(self.kind, enum.Enum):
            try:
                return self.kind(value)
            except ValueError:
                names = " or ".join(str(known.value) for known in self.kind)
                raise ConfigError(self.name, f"{value!r} is unknown", names) from None
        return tuple(value) if self.kind is tuple else value

    def verify(self, value: Any) -> None:
        if (value is None and self.optional) or self.check is None:
            return
        if not self.check.accepts(value):
            raise ConfigError(self.name, f"{value!r} {self.check.problem}", self.check.expected)


def setting(
    default: Any,
    help: str,
    check: Check | None = None,
    *,
    name: str | None = None,  # None: the field's
    size: bool = False,
    options: tuple[str, ...] = (),
    metavar: str | None = None,
    group: str | None = None,
    repr: bool = True,
) -> Any:
    """A dataclass field that is a setting."""
    facts = {
        "name": name,
        "help": help,
        "check": at_least(0 if default == 0 else 1) if size and check is None else check,
        "size": size,
        "options": options,
        "metavar": metavar,
        "group": group,
    }
    made = {"default_factory": dict} if default == {} else {"default": default}
    return dataclasses.field(**made, repr=repr, metadata={"setting": facts})


@functools.cache
def settings_of(config: type) -> tuple[Setting, ...]:
    """The settings that a config's fields declare, in their order."""
    hints = get_type_hints(config)
    found = []
    for field in dataclasses.fields(config):
        facts = field.metadata.get("setting")
        if facts is None:
            continue
        kinds = [kind for kind in _members(hints[field.name]) if kind is not types.NoneType]
        found.append(
            Setting(
                **{**facts, "name": facts["name"] or field.name},
                field=field.name,
                default={} if field.default is dataclasses.MISSING else field.default,
                kind=get_origin(kinds[0]) or kinds[0],
                optional=len(kinds) < len(_members(hints[field.name])),
            )
        )
    return tuple(found)


def verify_settings(config: Any) -> None:
    """Raise ConfigError for the first value that fails its check."""
    kind: type = type(config)
    for one in settings_of(kind):
        one.verify(getattr(config, one.field))


def json_object(field: str, value: Any) -> dict[str, Any]:
    expected = f"an object, such as {EXAMPLES[field]}" if field in EXAMPLES else "an object"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            shown = value if len(value) <= 40 else value[:40] + "…"
            raise ConfigError(field, f"{shown!r} is no JSON: {error}", expected) from None
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError(field, f"{value!r} is not an object", expected)
    return value


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
