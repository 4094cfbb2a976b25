"""Memory that results are copied to."""

from __future__ import annotations

import gc

import torch

from ratoon.execution.buffers import HostCopy


def test_a_copy_has_the_numbers_of_its_moment() -> None:
    tensor = torch.arange(6, dtype=torch.int32).view(2, 3)
    copy = HostCopy(tensor)
    tensor.zero_()
    copy.wait()
    assert copy.to_numpy().tolist() == copy.to_numpy().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_memory_is_used_again_and_never_by_two_copies() -> None:
    first, second = HostCopy(torch.full((300,), 1.0)), HostCopy(torch.full((300,), 2.0))
    places = {copy._memory.data_ptr() for copy in (first, second)}
    assert len(places) == 2
    taken = first.to_numpy()
    del first
    gc.collect()
    third = HostCopy(torch.full((290,), 3.0, dtype=torch.float32))
    assert third._memory.data_ptr() in places
    assert taken.tolist() == [1.0] * 300 and second.to_numpy().tolist() == [2.0] * 300
    assert third.to_numpy().tolist() == [3.0] * 290
