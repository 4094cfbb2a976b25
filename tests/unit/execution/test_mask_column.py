"""The table of masks that is filled while a device computes; a stream is replaced by what it waits for."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from ratoon.execution.sampling.mask_column import MaskColumn

CPU = torch.device("cpu")


def test_masks_are_there_at_once_where_no_stream_can_wait() -> None:
    column = MaskColumn(4, CPU)
    column.begin(2, 3, lambda table: table.fill(5)).result()
    assert column.words.shape == (4, 3) and column.words[:2].eq(5).all() and column.words[2:].eq(0).all()
    address = column.words.data_ptr()
    column.begin(4, 3, lambda table: table.fill(6)).result()
    assert column.words.data_ptr() == address, "graphs hold it"


def test_a_stream_waits_for_the_number_of_its_step_which_comes_behind_the_masks() -> None:
    column = MaskColumn(4, CPU)
    waits: list[int] = []
    column._wait_for_memory = lambda address, number: waits.append(number)
    may_fill = threading.Event()

    def fill(table: np.ndarray) -> None:
        may_fill.wait(60)
        table.fill(9)

    first = column.begin(1, 2, fill)
    second = column.begin(1, 2, lambda table: table.fill(8))
    assert waits == [1, 2] and column._filled[0] == 0 and column.words.eq(0).all()
    may_fill.set()
    column.finish()
    assert column._filled[0] == 2 and column.words[0].eq(8).all()
    first.result()
    second.result()


def test_a_step_whose_masks_fail_is_released_and_says_why() -> None:
    column = MaskColumn(4, CPU)
    column._wait_for_memory = lambda address, number: None

    def fail(table: np.ndarray) -> None:
        raise ValueError("the library is broken")

    filling = column.begin(1, 2, fail)
    column.finish()
    assert column._filled[0] == 1
    with pytest.raises(ValueError, match="broken"):
        filling.result()
    column.begin(1, 2, lambda table: table.fill(1)).result()
