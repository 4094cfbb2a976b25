"""gpu_memory_utilization: the share of a GPU that an engine takes, counted as vLLM counts it."""

from __future__ import annotations

import pytest
import torch

from ratoon.core.errors import ConfigError
from ratoon.execution.worker import share_of_gpu

GIB = 2**30


def with_gpu(monkeypatch: pytest.MonkeyPatch, free: int, total: int, reserved: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, total * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved * GIB)


def test_weights_are_part_of_the_share_and_other_programs_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, free=70, total=80, reserved=4)  # another program has 6
    assert share_of_gpu(torch.device("cuda"), 0.5) == 36 * GIB


def test_a_share_that_others_have_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, free=20, total=80, reserved=4)
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        share_of_gpu(torch.device("cuda"), 0.9)


def test_weights_that_fill_the_share_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, free=60, total=80, reserved=20)
    assert share_of_gpu(torch.device("cuda"), 0.1) == 0
