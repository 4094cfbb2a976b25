"""Sampling for the runner: chooses a token for each row by its request's params (execution/sampling/sampling_rows.py).

The arithmetic is in layers/sampling.py. Branches and their ends are unknown here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from ratoon.execution.inputs.cells import all_to_device, take, to_device
from ratoon.execution.sampling.sampling_rows import Needs, SamplingRows
from ratoon.execution.sampling.tokens import SampledTokens
from ratoon.layers import rejection, sampling
from ratoon.layers.sampling import Chosen, Mode

Tensor = torch.Tensor
OF_DRAFTS = np.uint64(0xA5A5A5A55A5A5A5A)  # makes of a seed that of the numbers which decide on drafts,
OF_DRAWN = np.uint64(0x3C3C3C3CC3C3C3C3)  # and that of the numbers by which drafts are drawn


class DrawnTokens(NamedTuple):
    """Drafts of a pass. Those that are not drawn are the likeliest tokens."""

    token_ids: Tensor  # [D] int64; -1: the logits can't be used
    distributions: Tensor  # [D, V] that sum up to 1
    is_drawn: list[bool]


class Sampler:
    """Chooses a token for each row of logits by the params of its request."""

    def __init__(self, rows: SamplingRows, by_rejection: bool = False) -> None:
        """`by_rejection`: drafts are accepted by rejection sampling, not where they equal what is sampled."""
        self.rows = rows
        self.by_rejection = by_rejection

    def sample(self, logits: Tensor, slots: np.ndarray, seeds: np.ndarray) -> SampledTokens:
        """One token for each row of logits [R, V]. Of these, only those that a grammar forbids may be changed.

        `slots` [R] is the slot of each row's request. A slot may occur several times, each with its own entry in
        `seeds` [R] uint64: several choices from one distribution.
        """
        on_cpu = logits.device.type == "cpu"
        if on_cpu:
            logits = logits.float()
        needs = self.rows.needs[slots]
        if not needs.any():
            return SampledTokens.of(sampling.greedy(logits))
        choose = self._choose_in_groups if on_cpu else self._choose_together
        return self._with_logprobs(choose(logits, slots, seeds, needs), logits, slots, needs)

    def draw_drafts(self, logits: Tensor, slots: np.ndarray, seeds: np.ndarray, places: np.ndarray) -> DrawnTokens:
        """Drafts for the `places` of the texts of these slots, by logits [D, V] of what drafts and the params of the
        requests. Below a grammar, which that does not know, they are not drawn."""
        needs = self.rows.needs[slots]
        numbers = self._plain_numbers(slots, seeds, needs)
        numbers["temperature"] = np.where(needs & Needs.MASK, np.float32(0), numbers["temperature"])
        numbers["uniforms"] = sampling.uniform(seeds ^ OF_DRAWN, places)
        temperature, top_k, top_p, min_p, drawing = all_to_device(list(numbers.values()), logits.device)
        found = rejection.distribution(logits.float(), temperature, sampling.Filters(top_k, top_p, min_p))
        drawn = sampling.draw_from(found, drawing)
        distributions = (found / found.sum(dim=-1, dtype=torch.float64, keepdim=True)).to(torch.float32)
        token_ids = drawn.token_ids.to(torch.int64).masked_fill(drawn.bad.bool(), -1)
        return DrawnTokens(token_ids, distributions, (numbers["temperature"] > 0).tolist())

    def sample_beside(
        self,
        logits: Tensor,
        slots: np.ndarray,
        seeds: np.ndarray,
        drafts: np.ndarray,
        proposed: Mapping[int, Tensor] | None = None,
    ) -> SampledTokens:
        """Chooses one token for each row, as `sample` does, where rows may have a draft behind them: `drafts` [R]; -1:
        there is none. A row's token is its draft exactly where that is accepted. `proposed`: by row, the distribution
        [V] that its draft was drawn from; the others were certain."""
        if not self.by_rejection:
            return self.sample(logits, slots, seeds)
        rows, device, needs = self.rows, logits.device, self.rows.needs[slots]
        edited = _rows_with(needs, Needs.EDITS)
        changed = logits.float().clone()
        if len(edited):
            index = to_device(edited, device)
            part = changed[index]  # a copy
            rows.edit(part, slots[edited])
            changed[index] = part
        numbers = self._plain_numbers(slots, seeds, needs)
        deciding = sampling.uniform(seeds ^ OF_DRAFTS, rows.num_outputs[slots])
        temperature, top_k, top_p, min_p, drawing, accepting, guesses = all_to_device(
            [*numbers.values(), deciding, drafts], device
        )
        probabilities = rejection.distribution(changed, temperature, sampling.Filters(top_k, top_p, min_p))
        drawn_from = None
        if proposed:
            drawn_from = torch.zeros(probabilities.shape, dtype=torch.float32, device=device)
            drawn_from.scatter_(1, guesses.clamp_min(0)[:, None], 1.0)
            drawn_from[to_device(np.array(list(proposed)), device)] = torch.stack(list(proposed.values()))
        chosen = rejection.accept_or_draw(probabilities, guesses, drawn_from, accepting, drawing)
        return self._with_logprobs(chosen, logits, slots, needs)

    def _with_logprobs(self, chosen: Chosen, logits: Tensor, slots: np.ndarray, needs: np.ndarray) -> SampledTokens:
        asked = _rows_with(needs, Needs.LOGPROBS)
        if len(asked) == 0:
            return SampledTokens.of(chosen)
        num_logprobs = self.rows.num_logprobs[slots[asked]]
        asked_tokens = chosen.token_ids[to_device(asked, logits.device)]
        logprobs = sampling.token_logprobs(take(logits, asked), asked_tokens, int(num_logprobs.max()))
        return SampledTokens(chosen.token_ids, chosen.bad, logprobs, asked, num_logprobs)

    def _choose_together(self, logits: Tensor, slots: np.ndarray, seeds: np.ndarray, needs: np.ndarray) -> Chosen:
        """All rows in one call, then those with edits again: on a GPU a pass over some more rows costs less than
        gathering them. Masks are part of the one call. Nothing waits for the device."""
        edited = _rows_with(needs, Needs.EDITS)
        masked, words = self.rows.masks(slots, edited)
        edited = np.setdiff1d(edited, masked, assume_unique=True)
        masks = None
        if len(masked):
            mask_of = np.full(len(slots), -1, np.int32)
            mask_of[masked] = np.arange(len(masked))
            masks = sampling.Masks(*all_to_device([mask_of, words], logits.device))
        if len(edited) == 0:
            return self._choose_plain(logits, slots, seeds, needs, masks)
        index = to_device(edited, logits.device)
        changed = logits[index].float()  # a copy
        self.rows.edit(changed, slots[edited])
        again = self._choose_plain(changed, slots[edited], seeds[edited], needs[edited])
        if len(edited) == len(slots):
            return again
        chosen = self._choose_plain(logits, slots, seeds, needs, masks)
        return Chosen(*(old.index_copy(0, index, new) for old, new in zip(chosen, again)))

    def _choose_plain(
        self,
        logits: Tensor,
        slots: np.ndarray,
        seeds: np.ndarray,
        needs: np.ndarray,
        masks: sampling.Masks | None = None,
    ) -> Chosen:
        """Without edits but masks, by params whose arrays travel to the device together."""
        numbers = self._plain_numbers(slots, seeds, needs)
        on_device = dict(zip(numbers, all_to_device(list(numbers.values()), logits.device)))
        return sampling.sample_plain(logits, **on_device, mode=_mode(all_of(needs)), masks=masks)

    def plain_numbers(
        self, slots: np.ndarray, seeds: np.ndarray, ahead: np.ndarray | int = 0
    ) -> tuple[dict[str, np.ndarray], Mode] | None:
        """The arguments of `sampling.sample_plain` for these rows. None: they need more than it does."""
        needs = self.rows.needs[slots]
        if self.rows.has_unread and not all_of(needs) & Needs.EDITS:
            self.rows.read_tokens()
            needs = self.rows.needs[slots]
        needed = all_of(needs)
        if needed & (Needs.EDITS | Needs.PENALTIES | Needs.LOGPROBS):
            return None
        mode = _mode(needed)
        return ({} if mode is Mode.GREEDY else self._plain_numbers(slots, seeds, needs, ahead)), mode

    def masked_numbers(self, slots: np.ndarray, seeds: np.ndarray) -> tuple[dict[str, np.ndarray], Mode] | None:
        """Returns the arguments of `sampling.sample_plain` for rows of which some have a grammar, whose masks are
        filled while the device computes. None: the rows need more than that, none of them has a grammar, or their masks
        can't be filled in that time."""
        needs = self.rows.needs[slots]
        needed = all_of(needs)
        is_more = needed & (Needs.PENALTIES | Needs.LOGPROBS) or not needed & Needs.MASK
        column = self.rows.mask_column
        if column is None or is_more or len(slots) > column.max_rows or not self.rows.have_fast_masks(slots):
            return None
        mode = _mode(needed)
        mask_of = np.where(needs & Needs.MASK, np.arange(len(slots), dtype=np.int32), np.int32(-1))
        numbers = {} if mode is Mode.GREEDY else self._plain_numbers(slots, seeds, needs)
        return {**numbers, "mask_of": mask_of}, mode

    def _plain_numbers(
        self, slots: np.ndarray, seeds: np.ndarray, needs: np.ndarray, ahead: np.ndarray | int = 0
    ) -> dict[str, np.ndarray]:
        rows = self.rows
        return {
            "temperature": np.where(needs & Needs.RANDOM, rows.temperature[slots], np.float32(0)),
            "top_k": rows.top_k[slots],
            "top_p": rows.top_p[slots],
            "min_p": rows.min_p[slots],
            "uniforms": sampling.uniform(seeds, rows.num_outputs[slots] + ahead),
        }

    def _choose_in_groups(self, logits: Tensor, slots: np.ndarray, seeds: np.ndarray, needs: np.ndarray) -> Chosen:
        """Group the rows by what they need, and sample each group by its function. For a CPU."""
        uniforms = sampling.uniform(seeds, self.rows.num_outputs[slots])
        edited = _rows_with(needs, Needs.EDITS)
        few, few_tokens = self.rows.few_tokens(slots, edited)
        edited = np.setdiff1d(edited, few, assume_unique=True)
        plain = np.flatnonzero(~(needs & Needs.EDITS).astype(bool))
        random, filtered = (needs & Needs.RANDOM) != 0, (needs & Needs.FILTER) != 0
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        bad = torch.empty(len(slots), dtype=torch.bool, device=logits.device)
        for members in (few, edited, plain):
            if len(members) == 0:
                continue
            if members is few:
                columns = to_device(few_tokens, logits.device)
                group_logits = sampling.logits_of_tokens(logits, to_device(few, logits.device), columns)
            else:
                group_logits = take(logits, members)
            if members is edited:
                group_logits = group_logits.clone() if group_logits is logits else group_logits
                self.rows.edit(group_logits, slots[members])
            for kind in (~random, random & ~filtered, filtered):
                places = np.flatnonzero(kind[members])
                if len(places) == 0:
                    continue
                rows = members[places]
                chosen = self._choose_alike(take(group_logits, places), slots[rows], uniforms[rows], needs[rows[0]])
                index = to_device(rows, logits.device)
                token_ids[index], bad[index] = chosen
                if members is few:
                    token_ids[index] = columns[to_device(places, logits.device), chosen.token_ids].clamp_min_(0)
        return Chosen(token_ids, bad)

    def _choose_alike(self, logits: Tensor, slots: np.ndarray, uniforms: np.ndarray, needs: int) -> Chosen:
        """For rows that all are greedy, all random, or all random and filtered."""
        if not needs & Needs.RANDOM:
            return sampling.greedy(logits)
        rows, device = self.rows, logits.device
        temperature = to_device(rows.temperature[slots], device)
        numbers = to_device(uniforms, device)
        if not needs & Needs.FILTER:
            return sampling.draw(logits, temperature, numbers)
        columns = (rows.top_k[slots], rows.top_p[slots], rows.min_p[slots])
        filters = sampling.Filters(*(to_device(column, device) for column in columns))
        return sampling.draw_filtered(logits, temperature, filters, numbers)


def all_of(needs: np.ndarray) -> int:
    return int(needs[0] if len(needs) == 1 else np.bitwise_or.reduce(needs))


def _mode(needed: int) -> Mode:
    """What `sample_plain` must do for rows that together have these needs."""
    return Mode.FILTERED if needed & Needs.FILTER else Mode.RANDOM if needed & Needs.RANDOM else Mode.GREEDY


def _rows_with(needs: np.ndarray, need: int) -> np.ndarray:
    return np.flatnonzero(needs & need)
