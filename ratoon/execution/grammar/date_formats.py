"""The formats `date`, `time` and `date-time` of JSON schemas, as expressions of the texts that parsers accept.

The grammar library has expressions of its own, which let through what is no time: second 60 in every minute, the 29th
of February in every year, the year 0. RFC 3339 allows second 60 for a leap second, at one moment of some years; the
types of Python, pydantic and JavaScript do not have it, and it is left out here.
"""

from __future__ import annotations

import json
from typing import Any

from ratoon.core.closed_objects import iterate_schemas

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"  # two digits of a multiple of 4 that is not 0
_LEAP_YEAR = f"([0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DAY_OF_YEAR = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_HOUR_AND_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
DATE = f"({_YEAR}-{_DAY_OF_YEAR}|{_LEAP_YEAR}-02-29)"
TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](\.[0-9]+)?([zZ]|[+-]{_HOUR_AND_MINUTE})"
EXPRESSIONS = {"date": DATE, "time": TIME, "date-time": f"{DATE}[tT]{TIME}"}


def spell_out_dates(schema: Any) -> Any:
    """The schema, or a copy in which these formats are patterns."""
    if not any(_has_date(part) for part in iterate_schemas(schema)):
        return schema
    copy = json.loads(json.dumps(schema))
    for part in list(iterate_schemas(copy)):
        if _has_date(part):
            pattern = f"^{EXPRESSIONS[part.pop('format')]}$"
            if "pattern" in part:
                part["allOf"] = [*part.get("allOf", ()), {"pattern": pattern}]
            else:
                part["pattern"] = pattern
    return copy


def _has_date(schema: dict[str, Any]) -> bool:
    name = schema.get("format")
    return isinstance(name, str) and name in EXPRESSIONS
