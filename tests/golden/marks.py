"""Marks that several files of these tests need."""

from __future__ import annotations

import pytest
import torch

from ratoon.layers.native_ops import native_ops_reasons

exact_on_cpu = pytest.mark.skipif(
    bool(native_ops_reasons(torch.device("cpu"), torch.float32)), reason="torch's products depend on the batch"
)
