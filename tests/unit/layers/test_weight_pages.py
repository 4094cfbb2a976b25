"""Memory of packed weights: pieces of shared mappings that do not overlap."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import pytest
import torch

from ratoon.layers.native import pages


def test_pieces_are_apart_and_begin_with_a_cache_line() -> None:
    pieces = [pages.new_weight(size, 3, dtype=torch.int16).fill_(size) for size in (1, 100, 5000, 7)]
    assert [tuple(piece.shape) for piece in pieces] == [(1, 3), (100, 3), (5000, 3), (7, 3)]
    assert all(piece.data_ptr() % pages.ALIGNMENT == 0 and (piece == len(piece)).all() for piece in pieces)


def test_a_piece_larger_than_a_mapping_has_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAPPING", 256)
    piece = pages.new_weight(1000, dtype=torch.uint8)
    assert len(piece) == 1000 and piece.data_ptr() % pages.LARGE_PAGE == 0
    assert (piece.fill_(7) == 7).all()


def test_a_mapping_is_given_back_with_its_last_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAPPING", 256)
    monkeypatch.setattr(pages, "_left", torch.empty(0, dtype=torch.uint8))
    mappings = []
    make = pages.mmap.mmap

    def make_and_note(*args: Any, **kwargs: Any) -> mmap.mmap:
        made = make(*args, **kwargs)
        mappings.append(weakref.ref(made))
        return made

    monkeypatch.setattr(pages.mmap, "mmap", make_and_note)
    first, second = pages.new_weight(128, dtype=torch.uint8), pages.new_weight(128, dtype=torch.uint8)
    other = pages.new_weight(128, dtype=torch.uint8)
    assert len(mappings) == 2
    del first
    assert second.fill_(1).sum() == 128 and mappings[0]() is not None
    del second
    assert mappings[0]() is None and other is not None


def test_a_system_without_large_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_left", torch.empty(0, dtype=torch.uint8))
    monkeypatch.setattr(pages.mmap, "MADV_HUGEPAGE", -1, raising=False)  # refused: Invalid argument
    assert (pages.new_weight(64, dtype=torch.uint8).fill_(3) == 3).all()
