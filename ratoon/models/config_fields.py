"""Reads typed fields of a Hugging Face config, the dict of a config.json. The parsers interpret them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ratoon.core.errors import ModelError
from ratoon.models.damage import show

LARGEST = 2**31 - 1  # of integers in a config: token and position counts have 32 bits
LARGEST_NUMBER = 1e30  # of others; infinity is none
MAX_TEXT = 200
MOST_LAYERS = 4096  # each costs time before the weights are checked
DTYPES = ("float32", "float16", "bfloat16")

Value = TypeVar("Value")


class ConfigFields:
    """Reads typed fields of one config; a missing or wrong one is a ModelError with the field's name."""

    def __init__(self, raw: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.raw = raw
        self.source = source
        self.prefix = prefix

    def count(self, name: str, default: int | None = None, most: int = LARGEST) -> int:
        """A whole number above zero; required unless there is a default."""
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise self.wrong(name, "is missing", "a whole number above 0")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, f"is {show(value)}", "a whole number above 0")
        if value > most:
            raise self.wrong(name, f"is {show(value)}", f"at most {most}")
        return value

    def layers(self, name: str, default: int | None = None) -> int:
        return self.count(name, default, MOST_LAYERS)

    def optional_count(self, name: str) -> int | None:
        return None if self.raw.get(name) is None else self.count(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise self.wrong(name, "is missing", "a number above 0")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < LARGEST_NUMBER:
            raise self.wrong(name, f"is {show(value)}", "a number above 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.raw.get(name) is None else self.number(name)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of so many numbers above zero; required."""
        value = self.raw.get(name)
        items = value if isinstance(value, list) else []
        fits = all(
            isinstance(item, (int, float)) and not isinstance(item, bool) and 0 < item < LARGEST_NUMBER
            for item in items
        )
        if len(items) != count or not fits:
            shown = "is missing" if value is None else f"has {len(items)} entries" if fits else "holds other things"
            raise self.wrong(name, shown, f"a list of {count} numbers above 0")
        return tuple(float(item) for item in items)

    def flag(self, name: str, default: bool) -> bool:
        return self._typed(name, bool, default, "true or false")

    def text(self, name: str, default: str) -> str:
        value = self._typed(name, str, default, "a string")
        if len(value) > MAX_TEXT:
            raise self.wrong(name, f"is {show(value)}", f"at most {MAX_TEXT} characters")
        return value

    def _typed(self, name: str, kind: type[Value], default: Value, expected: str) -> Value:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.wrong(name, f"is {show(value)}", expected)
        return value

    def below(self, name: str) -> ConfigFields:
        """The fields of a nested object; none when it is absent."""
        value = self.raw.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.wrong(name, f"is {show(value)}", "an object")
        return ConfigFields(value, self.source, f"{self.prefix}{name}.")

    def wrong(self, name: str, problem: str, expected: str) -> ModelError:
        return ModelError(self.source, f"config field {self.prefix}{name} {problem}", f"expected {expected}")

    def divisible(self, name: str, value: int, divisor_name: str, divisor: int) -> int:
        """`value` / `divisor`, which must divide it."""
        if value % divisor:
            raise self.wrong(name, f"is {value}", f"a multiple of {divisor_name} ({divisor})")
        return value // divisor

    def dtype(self) -> str:
        name = self.text("dtype", self.text("torch_dtype", "float32")).removeprefix("torch.")
        if name not in DTYPES:
            raise self.wrong("dtype", f"is {show(name)}", " or ".join(DTYPES))
        return name

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of them, or nothing."""
        value = self.raw.get(name)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        for item in listed:
            if isinstance(item, bool) or not isinstance(item, int) or item > LARGEST:
                raise self.wrong(name, f"is {show(value)}", "a token id or a list of them")
        return tuple(token for token in listed if token >= 0)  # some files write -1 for none

    def token_id(self, name: str) -> int | None:
        """The only one, or the first."""
        found = self.token_ids(name)
        return found[0] if found else None
