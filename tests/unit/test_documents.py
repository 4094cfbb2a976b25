"""The comparison of a page with what its commands print (tests/e2e/documents.py) notices what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.documents import difference, steps_of

PAGE = """\
# A page

```python
print(1)
```
```text
1
```

```python
x = 2
```

## A section

```console
$ say 'two
lines' \\
    --loud
TWO LINES
$ true
```

```
no command
```
"""


def test_steps_are_in_the_order_of_the_page_with_their_outputs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = [(step.line, step.section, step.block, step.language, step.source, step.shown) for step in steps_of(page)]
    assert found == [
        (4, 1, 0, "python", "print(1)\n", "1\n"),
        (11, 1, 2, "python", "x = 2\n", None),
        (17, 2, 3, "shell", "say 'two\nlines' \\\n    --loud", "TWO LINES"),
        (21, 2, 3, "shell", "true", None),
    ]


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ('{"a":1,\n"b":2}', '{"a":1,"b":2}'),  # wrapped
        ('{"id":"…","n":3}', '{"id":"cmpl-17","n":3}'),
        ("-0.947 Paris", "-0.948 Paris"),
        ("[0.35…, 0.42…]", "[0.35123, 0.42001]"),
        ("1.5e-05", "1.6e-05"),
        ("1.000 0.929", "  1.000   0.930\n"),
    ],
)
def test_what_agrees(shown: str, printed: str) -> None:
    assert difference(shown, printed) == ""


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("Paris", "London"),
        ("Paris", "Paris."),
        ("tokens: 12", "tokens: 13"),
        ("-0.947 Paris", "-0.951 Paris"),
        ("[0.35…]", "[0.38123]"),
        ("1.5e-05", "1.5e-04"),
        ("a … c", "a b d"),
    ],
)
def test_what_does_not(shown: str, printed: str) -> None:
    assert difference(shown, printed) != ""


def test_of_a_measurement_the_words_must_agree() -> None:
    assert difference("time 1.50 ms 3×", "time 22 ms 3.5×", is_measured=True) == ""
    assert difference("It follows.\n…\nIt ended.", "It follows.\n7 done\nIt ended.", is_measured=True) == ""
    assert difference("time 1.50 ms", "time 1.50 s", is_measured=True) != ""


def test_a_long_output_that_does_not_agree_is_told_soon() -> None:
    """Places for `…` are not tried in all combinations."""
    assert difference("… a\n" * 40 + "b", "x a\n" * 2000 + "c") != ""
