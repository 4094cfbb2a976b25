"""Strategies that are built once: hypothesis validates each new one, which takes longer than to draw from it."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import strategies as st


@functools.lru_cache(maxsize=None, typed=True)
def among(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@functools.cache
def number(smallest: int, largest: int) -> st.SearchStrategy[int]:
    return st.integers(smallest, largest)


@functools.cache
def number_or_none(smallest: int, largest: int) -> st.SearchStrategy[int | None]:
    return st.one_of(st.none(), st.integers(smallest, largest))
