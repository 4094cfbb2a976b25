"""A docstring is a whole sentence that stands alone: it leans neither on the name above it nor on another docstring."""

from __future__ import annotations

import re

import pytest

from tests.unit.test_import_direction import PACKAGE

# Words that only continue another sentence, where a docstring opens. The text is searched and not parsed: that would
# take seconds.
LEANING = re.compile(r'^ *r?"""(?:Also|As|Likewise|Of|That|The same|Those)\b.*', re.MULTILINE)


def test_docstrings_of_the_package_stand_alone() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        found += [f"{name}: {line.strip()}" for line in LEANING.findall(path.read_text(encoding="utf-8"))]
    assert not found, "these should begin with what it returns, does or is:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "leans"),
    [
        ("Of every beam.", True),
        ("Those of a step, often none.", True),
        ("As `encode`, of a part of the text.", True),
        ("The same, of the stage before.", True),
        ("That keys and values are kept in.", True),
        ("Returns the rules of every beam.", False),
        ("Offers the next token.", False),
        ("The dtype in which keys and values are kept.", False),
    ],
)
def test_which_docstrings_lean_on_others(text: str, leans: bool) -> None:
    for head in ("", "def f():\n    ", "class C:\n    async def f(self):\n        r"):
        assert (LEANING.search(f'{head}"""{text}"""\n') is not None) is leans
