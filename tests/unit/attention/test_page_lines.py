"""Descriptors of pages are made once, and keep no memory alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from ratoon.attention import page_lines
from ratoon.attention.page_lines import PageLines


def test_a_descriptor_is_made_once_for_each_way_to_read_pages() -> None:
    made: list[Any] = []
    lines = PageLines(lambda *arguments: made.append(arguments) or arguments)
    pages = torch.zeros(4, 2, 2, 16, 32, dtype=torch.bfloat16)
    first = lines.describe(pages, 256, 32, [16, 32])
    assert lines.describe(pages, 256, 32, [16, 32]) is first and len(made) == 1
    assert first == ((pages.data_ptr(), torch.bfloat16), [256, 32], [32, 1], [16, 32])
    assert lines.describe(pages, 256, 32, [8, 32]) is not first
    assert lines.describe(pages[1:], 192, 32, [16, 32]) is not first


def test_a_descriptor_keeps_no_tensor() -> None:
    lines, pages = PageLines(lambda base, *_: base), torch.zeros(64, 32)
    seen = weakref.ref(pages.untyped_storage())
    assert lines.describe(pages, 64, 32, [16, 32]).data_ptr() == pages.data_ptr()
    del pages
    gc.collect()
    assert seen() is None


def test_descriptors_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_lines, "MAX_DESCRIPTORS", 3)
    lines, pages = PageLines(lambda *arguments: arguments), torch.zeros(64, 32)
    for num_lines in range(10):
        lines.describe(pages, num_lines, 32, [16, 32])
        assert len(lines._kept) <= 3
