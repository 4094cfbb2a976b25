"""Parses and formats sizes of memory ("2GiB")."""

from __future__ import annotations

import re

from ratoon.core.errors import ConfigError

UNITS = {
    "": 1,
    "B": 1,
    "K": 2**10,
    "KIB": 2**10,
    "KB": 10**3,
    "M": 2**20,
    "MIB": 2**20,
    "MB": 10**6,
    "G": 2**30,
    "GIB": 2**30,
    "GB": 10**9,
    "T": 2**40,
    "TIB": 2**40,
    "TB": 10**12,
}


def parse_size(field: str, value: int | str, least: int = 1) -> int:
    """Bytes, from a number or from text such as 2GiB, 512M or 1.5GB. `least` is 0 where 0 is allowed."""
    expected = "a number of bytes, or text such as 512MiB or 2GiB"
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in UNITS:
            raise ConfigError(field, f"{value!r} is not a size", expected)
        value = int(float(match[1]) * UNITS[match[2].upper()])
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(field, f"{value!r} is not a size", expected)
    return value


def format_size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
