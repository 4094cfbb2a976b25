"""Hidden states as torch tensors. The memory is shared; torch is loaded when first needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratoon.engine.output.answers import Output, arrange, states_of

if TYPE_CHECKING:
    import torch


def with_torch_tensors(output: Output) -> None:
    """Put tensors where an output has arrays of hidden states."""
    arrange(output)
    for states in states_of(output):
        if states.tensor is not None:
            states.tensor = as_torch(states.tensor, states.dtype)


def as_torch(array: Any, dtype: str) -> torch.Tensor:
    import torch

    if dtype == "bfloat16":  # which numpy does not know: there they are whole numbers
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)
