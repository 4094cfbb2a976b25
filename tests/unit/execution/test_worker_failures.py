"""What a worker does on CUDA after a step that raised: free memory, and tell a lost device. With a faked GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from ratoon.core.errors import DeviceLostError
from ratoon.execution.worker import Worker


class FakeGpu:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_failures: int = 0) -> None:
        self.num_emptied = 0
        self._num_failures = num_failures
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)

    def synchronize(self, device: object = None) -> None:
        if self._num_failures:
            self._num_failures -= 1
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def empty_cache(self) -> None:
        self.num_emptied += 1


def worker_on(device: str) -> Worker:
    made = object.__new__(Worker)
    made._device = torch.device(device)
    return made


def failure_of(step: Callable[[], None]) -> Exception:
    try:
        step()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def test_memory_that_a_step_held_when_it_ran_out_is_free_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    held: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        activations = torch.zeros(4)
        held.append(weakref.ref(activations))
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    error = failure_of(step)
    assert held[0]() is not None, "the traceback holds it"
    worker_on("cuda").examine_failure(error)
    assert held[0]() is None and gpu.num_emptied == 1


def test_an_error_that_is_over_is_the_steps_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, num_failures=1)
    worker_on("cuda").examine_failure(RuntimeError("CUDA error: invalid argument"))
    assert gpu.num_emptied == 0


def test_an_error_that_stays_means_a_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch, num_failures=1000)
    for error in (RuntimeError("CUDA error: an illegal memory access was encountered"), torch.OutOfMemoryError("full")):
        with pytest.raises(DeviceLostError, match="does not respond after an error") as told:
            worker_on("cuda").examine_failure(error)
        assert told.value.__cause__ is error


def test_on_a_cpu_there_is_no_device_to_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch, num_failures=1000)
    worker_on("cpu").examine_failure(RuntimeError("any"))
