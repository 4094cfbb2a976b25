"""The order in which several processes run the tests: long ones first in each part of the list."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import with_long_tests_first


def items_of(marks: str) -> Any:
    return [
        SimpleNamespace(name=f"{mark}{place}", get_closest_marker=lambda name, mark=mark: mark if mark == "L" else None)
        for place, mark in enumerate(marks)
    ]


@pytest.mark.parametrize(
    ("marks", "num_workers", "expected"),
    [
        ("ooooLooLo", 3, "L4 o0 o1|L7 o2 o3|o5 o6 o8"),
        ("oooLoooL", 3, "L3 o0|L7 o1 o2|o4 o5 o6"),
        ("LLLoL", 2, "L0 L1|L2 L4 o3"),
        ("oo", 4, "|||"),
        ("", 2, "|"),
    ],
)
def test_every_process_begins_with_long_tests(marks: str, num_workers: int, expected: str) -> None:
    items = items_of(marks)
    ordered = with_long_tests_first(items, num_workers)
    assert sorted(item.name for item in ordered) == sorted(item.name for item in items)
    if expected.strip("|"):
        assert [item.name for item in ordered] == expected.replace("|", " ").split()
