"""Writes the table of families in docs/models.md from ratoon/models/families.py. A test compares."""

from __future__ import annotations

import re
from pathlib import Path

from ratoon.models.families import markdown_table

PAGE = Path(__file__).with_name("models.md")
TABLE = re.compile(r"\| `architectures` \| GGUF \| notes \|\n(?:\|.*\n)+")


def page() -> str:
    return TABLE.sub(lambda _: markdown_table() + "\n", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
