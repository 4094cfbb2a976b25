"""Penalties of sampled rows on a GPU: what occurred in each row's text stays on the device, which adds sampled tokens
itself. The host never waits for a token because of them, as it would for the rule (rules/penalties.py), which beams and
CPUs use.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ratoon.execution.inputs.cells import all_to_device

Tensor = torch.Tensor


class PenaltyRows:
    """The state of every slot that has penalties, [vocabulary] each, allocated when slots need it."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._occurred = torch.zeros(0, vocab_size, dtype=torch.int16, device=device)
        self._weights = np.zeros((0, 3), np.float32)  # by state
        self._state_of: dict[int, int] = {}  # by slot
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._state_of)

    def add(self, slot: int, weights: tuple[float, float, float], prompt: Sequence[int], output: Sequence[int]) -> None:
        """`weights`: of repetition, frequency and presence."""
        from ratoon.layers.triton.penalties import IN_PROMPT, MAX_COUNT

        self.remove(slot)
        if not self._free:
            self._grow()
        state = self._state_of[slot] = self._free.pop()
        self._weights[state] = weights
        vocab_size = self._occurred.shape[1]
        occurred = np.bincount(_known(output, vocab_size), minlength=vocab_size).clip(max=MAX_COUNT).astype(np.int16)
        if weights[0] != 1.0:  # the others do not look at the prompt
            occurred[_known(prompt, vocab_size)] |= IN_PROMPT
        [row] = all_to_device([occurred], self._occurred.device)
        self._occurred[state] = row

    def copy(self, slot: int, source: int, token_ids: Sequence[int]) -> None:
        """Give a slot the penalties of another one, as if these tokens had followed there."""
        self.remove(slot)
        if source not in self._state_of:
            return
        if not self._free:
            self._grow()
        state = self._state_of[slot] = self._free.pop()
        self._weights[state] = self._weights[self._state_of[source]]
        self._occurred[state] = self._occurred[self._state_of[source]]
        self.append_run(slot, token_ids)

    def remove(self, slot: int) -> None:
        state = self._state_of.pop(slot, None)
        if state is not None:
            self._free.append(state)

    def apply(self, logits: Tensor, slots: np.ndarray) -> None:
        """Change the logits [R, V] of the slots [R] that have penalties, in place."""
        from ratoon.layers.triton.penalties import apply_penalties

        rows, states = self._members(slots)
        if len(rows):
            on_logits, of_states, weights = all_to_device([rows, states, self._weights[states]], logits.device)
            apply_penalties(logits, on_logits, of_states, weights, self._occurred)

    def append(self, slots: np.ndarray, token_ids: Tensor) -> None:
        """A token, on the device, for each of these slots [R]. Slots are distinct."""
        from ratoon.layers.triton.penalties import count_tokens

        rows, states = self._members(slots)
        if len(rows):
            of_states, of_tokens = all_to_device([states, rows], token_ids.device)
            count_tokens(self._occurred, of_states, of_tokens, token_ids)

    def append_run(self, slot: int, token_ids: Sequence[int]) -> None:
        """Several tokens for one slot."""
        for token_id in token_ids if slot in self._state_of else ():
            self.append(np.array([slot]), torch.full((1,), token_id, device=self._occurred.device))

    def _members(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places of slots with penalties among these, and their states."""
        found = [(row, self._state_of[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._state_of]
        rows, states = np.array(found, np.int64).reshape(-1, 2).T
        return rows, states

    def _grow(self) -> None:
        """Double the room."""
        old = len(self._occurred)
        added = max(old, 1)
        room = torch.zeros(added, self._occurred.shape[1], dtype=torch.int16, device=self._occurred.device)
        self._occurred = torch.cat([self._occurred, room])
        self._weights = np.concatenate([self._weights, np.zeros((added, 3), np.float32)])
        self._free += range(old + added - 1, old - 1, -1)


def _known(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Tokens that have a logit: a prompt may hold placeholders without one."""
    ids = np.asarray(token_ids, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]
