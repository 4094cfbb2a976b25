"""What drafts tokens on the device: rows in, tokens out. drafting.py decides which rows run, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ratoon.execution.inputs.step_inputs import StepInputs
from ratoon.execution.passes.ends import Layers

Tensor = torch.Tensor
Choose = Callable[[Tensor], Tensor]  # logits [D, V] → tokens [D], -1 where there is none


class PassOfDrafts(NamedTuple):
    """One pass: the rows of branches, and how many tokens each has behind what it has computed."""

    rows: np.ndarray  # [R] of InputBatch
    counts: np.ndarray  # [R]
    read: np.ndarray  # [D] of the pass's tokens: behind each of them a token is guessed

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())


class Drafter(Protocol):
    """A model or a head that guesses next tokens. Its keys and values lie in blocks that branches have anyway."""

    lag: int  # 0: a row reads the token at its position; 1: the token behind it, with the model's states at it
    reads: Layers | None  # the layers of the model whose states it reads

    def run(
        self, one: PassOfDrafts, states: Tensor | None, choose: Choose | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Runs a pass. `states` [layers, T, H]: those that it reads, in the first pass of a step; [T, H] later: its
        own. `choose`: chooses the tokens; None: the likeliest ones. Returns the tokens that it guesses, [D], on its
        device, -1 where it can't; and its own states [D, H]."""
        ...

    def clear(self) -> None:
        """Drops what it keeps for repeated passes: the caches are about to be freed."""
        ...


class Inputs(Protocol):
    """Makes the inputs of a pass: InputPreparation or DeviceInputs."""

    def prepare(
        self, batch_rows: np.ndarray, num_scheduled: np.ndarray, unwritten: np.ndarray | None = None
    ) -> StepInputs: ...
