"""Writes the tables of docs/models.md: families from ratoon/models/families.py, speeds from ratoon/models/speeds.py. A
test compares."""

from __future__ import annotations

import re
from pathlib import Path

from ratoon.models import families, speeds

PAGE = Path(__file__).with_name("models.md")
TABLE = re.compile(r"\| `architectures` \| GGUF \| notes \|\n(?:\|.*\n)+")


SPEEDS = re.compile(r"\| model \| weights \| machine \|.*\n(?:\|.*\n)+")
LIBRARY = re.compile(r"(?<=Tests compare these with it: )[^.]*(?=\.)")


def page() -> str:
    text = TABLE.sub(lambda _: families.markdown_table() + "\n", PAGE.read_text())
    text = SPEEDS.sub(lambda _: speeds.markdown_table() + "\n", text)
    return LIBRARY.sub(lambda _: ", ".join(f"`{name}`" for name in families.LIBRARY_FAMILIES), text)


if __name__ == "__main__":
    PAGE.write_text(page())
