"""Marks that several files of these tests need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from ratoon.layers.native_ops import native_ops_reasons

exact_on_cpu = pytest.mark.skipif(
    bool(native_ops_reasons(torch.device("cpu"), torch.float32)), reason="torch's products depend on the batch"
)


def checked(cases: Iterable[Any], *of_check: Any) -> list[Any]:
    """The cases of a test, of which these are part of `make check`."""
    return [pytest.param(case, marks=pytest.mark.check) if case in of_check else case for case in cases]
