"""Memory that results are copied to, and memory that steps are sent from."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from ratoon.execution.inputs import packed as packed_buffer
from ratoon.execution.inputs.buffers import HostCopy
from ratoon.execution.inputs.packed import PackedBuffer


def test_a_copy_has_the_numbers_of_its_moment() -> None:
    tensor = torch.arange(6, dtype=torch.int32).view(2, 3)
    copy = HostCopy(tensor)
    tensor.zero_()
    copy.wait()
    assert copy.to_numpy().tolist() == copy.to_numpy().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_memory_is_used_again_and_never_by_two_copies() -> None:
    first, second = HostCopy(torch.full((300,), 1.0)), HostCopy(torch.full((300,), 2.0))
    places = {copy._memory.words.data_ptr() for copy in (first, second)}
    assert len(places) == 2
    taken = first.to_numpy()
    del first
    gc.collect()
    third = HostCopy(torch.full((290,), 3.0, dtype=torch.float32))
    assert third._memory.words.data_ptr() in places
    assert taken.tolist() == [1.0] * 300 and second.to_numpy().tolist() == [2.0] * 300
    assert third.to_numpy().tolist() == [3.0] * 290


class Marks:
    """Events of both sides of a PackedBuffer: what was recorded and waited for, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def of_side(self, number: int) -> SimpleNamespace:
        def note(what: str) -> None:
            self.log.append(f"{what} {number}")

        return SimpleNamespace(record=lambda: note("record"), synchronize=lambda: note("wait"))


def test_a_side_of_packed_arrays_is_written_again_only_when_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a step that failed between its numbers and its end, of which nothing was said."""
    monkeypatch.setattr(packed_buffer, "record", lambda event: event.record())
    packed, marks = PackedBuffer({"counts": (3, torch.int32)}, torch.device("cpu")), Marks()
    packed._events = [marks.of_side(0), marks.of_side(1)]  # type: ignore[list-item]
    for is_noted in (True, False, True):
        packed.turn()
        if is_noted:
            packed.note_read()
            packed.note_read()
    assert marks.log == ["wait 1", "record 1", "wait 0", "record 0", "wait 1", "record 1"]
