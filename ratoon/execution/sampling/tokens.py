"""Tokens that were chosen for the rows of a step, on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ratoon.core.outputs import LogprobsLists
from ratoon.execution.inputs.buffers import HostCopy
from ratoon.layers.sampling import Chosen, TokenLogprobs

Tensor = torch.Tensor


class SampledTokens:
    """One token for each row, and the log-probabilities that rows asked for.

    They are where they were computed, in memory that the next step may overwrite, until `start_copy`. The first access
    to values without it (to_numpy, bad_rows, logprobs_lists) waits for the device.
    """

    def __init__(
        self,
        token_ids: Tensor,  # [R]; -1: the row has none
        bad: Tensor | None = None,  # [R] bool: rows that have none, where `token_ids` does not say so
        logprobs: TokenLogprobs | None = None,
        logprob_rows: np.ndarray | None = None,  # [L] the rows that asked
        num_logprobs: np.ndarray | None = None,  # [L] how many alternatives each asked for
    ) -> None:
        self.token_ids = token_ids
        self._bad = bad
        self._logprobs = logprobs
        self._logprob_rows = logprob_rows
        self._num_logprobs = num_logprobs
        self._copy: HostCopy | None = None
        self._values: np.ndarray | None = None  # all of it on the host, once it is there
        # Where they are in memory of the host that is still that of this step: tokens, and which are bad
        self._here: tuple[np.ndarray, np.ndarray | None] | None = None
        if token_ids.device.type == "cpu":
            self._here = token_ids.numpy(), None if bad is None else bad.numpy()

    @classmethod
    def of(cls, chosen: Chosen) -> SampledTokens:
        return cls(chosen.token_ids, chosen.bad)

    def start_copy(self) -> None:
        """Copy everything to the host without waiting. Values are there when the step is done."""
        self._copy = HostCopy(self._packed())
        self._here = None

    def wait(self) -> None:
        """Until the copy is there."""
        if self._copy is not None:
            self._copy.wait()

    @property
    def bad_rows(self) -> list[int]:
        """Rows without a token: NaN or infinite logits, or every token forbidden."""
        if self._here is not None:
            token_ids, bad = self._here
            bad = token_ids < 0 if bad is None else bad
            return np.flatnonzero(bad).tolist() if bad.any() else []
        return np.flatnonzero(self._on_host()[: len(self.token_ids)] < 0).tolist()

    def to_numpy(self) -> np.ndarray:
        """The token ids, [R]. Those of bad rows are any number."""
        if self._here is not None:
            return self._here[0]
        return self._on_host()[: len(self.token_ids)].astype(np.int64)

    def logprobs_lists(self) -> dict[int, LogprobsLists]:
        """For each row that asked, by its number: its own token, then as many alternatives as it asked for."""
        if self._logprobs is None or self._logprob_rows is None or self._num_logprobs is None:
            return {}
        lists = logprobs_from_host(self._on_host()[len(self.token_ids) :], self._logprobs.token_ids.shape)
        result = {}
        for place, (row, num_top) in enumerate(zip(self._logprob_rows.tolist(), self._num_logprobs.tolist())):
            ids, values = lists.token_ids[place][: num_top + 1], lists.logprobs[place][: num_top + 1]
            result[row] = LogprobsLists([ids], [values], [lists.sampled_ranks[place]])
        return result

    def _packed(self) -> Tensor:
        """All results as one flat tensor on the device, for one copy to the host."""
        token_ids = self.token_ids if self._bad is None else self.token_ids.masked_fill(self._bad, -1)
        return token_ids if self._logprobs is None else torch.cat([token_ids.double(), packed_logprobs(self._logprobs)])

    def _on_host(self) -> np.ndarray:
        if self._values is None:
            self._values = self._packed().cpu().numpy() if self._copy is None else self._copy.to_numpy()
        return self._values


class UnreadTokens(NamedTuple):
    """Tokens on their way to the host, which the rules of some slots read."""

    tokens: SampledTokens
    places: np.ndarray  # [N] of those that are read, among the tokens
    slots: np.ndarray  # [N] that they belong to
    incarnations: np.ndarray  # [N] of these slots, when they were sampled

    def arrived(self, incarnations: np.ndarray) -> list[tuple[int, list[int] | None]]:
        """Wait for them. Returns the slots that still have the branch that got a token, and that token; None: it got
        none."""
        self.tokens.wait()
        token_ids, bad = self.tokens.to_numpy()[self.places].tolist(), set(self.tokens.bad_rows)
        is_same = (incarnations[self.slots] == self.incarnations).tolist()
        return [
            (slot, None if place in bad else [token_id])
            for place, slot, token_id, same in zip(self.places.tolist(), self.slots.tolist(), token_ids, is_same)
            if same
        ]


class ToldTokens(NamedTuple):
    """Tokens without a choice that a result told, and that follow those of a slot."""

    slots: np.ndarray  # [1]
    incarnation: int
    token_ids: list[int]

    def arrived(self, incarnations: np.ndarray) -> list[tuple[int, list[int] | None]]:
        slot = int(self.slots[0])
        return [(slot, self.token_ids)] if incarnations[slot] == self.incarnation else []


def packed_logprobs(logprobs: TokenLogprobs) -> Tensor:
    """One flat float64 tensor: it holds ids, ranks and float32 values exactly, and needs one copy to the host."""
    return torch.cat([part.double().flatten() for part in (logprobs.token_ids, logprobs.logprobs, logprobs.ranks)])


def logprobs_from_host(packed: np.ndarray, shape: Sequence[int]) -> LogprobsLists:
    num_cells = shape[0] * shape[1]
    token_ids = packed[:num_cells].astype(np.int64).reshape(*shape)
    logprobs = packed[num_cells : 2 * num_cells].reshape(*shape)
    return LogprobsLists(token_ids.tolist(), logprobs.tolist(), packed[2 * num_cells :].astype(np.int64).tolist())


class PromptLogprobs:
    """Log-probabilities of prompt tokens, on the device until `lists`; a step copies those of a prompt at once."""

    def __init__(self, parts: Sequence[TokenLogprobs]) -> None:
        """Made of those of consecutive rows. On a GPU their copy to the host begins now, and is not waited for."""
        self._shapes = [part.token_ids.shape for part in parts]
        packed = torch.cat([packed_logprobs(part) for part in parts])
        self._packed = HostCopy(packed) if packed.device.type == "cuda" else packed

    def lists(self) -> LogprobsLists:
        """To be called when the step is done."""
        packed = self._packed.to_numpy() if isinstance(self._packed, HostCopy) else self._packed.numpy()
        lists = LogprobsLists([], [], [])
        for shape in self._shapes:
            size = shape[0] * (2 * shape[1] + 1)
            part, packed = logprobs_from_host(packed[:size], shape), packed[size:]
            lists.token_ids += part.token_ids
            lists.logprobs += part.logprobs
            lists.sampled_ranks += part.sampled_ranks
        return lists
