"""How the encoder inputs of a step are shared out to passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ratoon.execution.passes.encoder import _passes


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (None, [[5, 5, 9, 1, 20, 3]]),
        (10, [[5, 5], [9, 1], [20], [3]]),
        (4, [[5], [5], [9], [1], [20], [3]]),
        (100, [[5, 5, 9, 1, 20, 3]]),
    ],
)
def test_a_pass_has_as_many_inputs_as_fit_in_order(most: int | None, expected: list[list[int]]) -> None:
    steps: Any = [
        SimpleNamespace(encoder_input=SimpleNamespace(num_positions=length)) for length in (5, 5, 9, 1, 20, 3)
    ]
    found = _passes(steps, most)
    assert [[step.encoder_input.num_positions for step in together] for together in found] == expected
