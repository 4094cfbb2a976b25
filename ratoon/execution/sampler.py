"""Sampling for the runner: what each row's request asks for, kept between steps, and the choice of a token for each.

The arithmetic is in layers/sampling.py. Which token belongs to which branch, and when a branch ends, is not known here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ratoon.core.outputs import LogprobsLists
from ratoon.core.params import SamplingParams
from ratoon.layers import sampling
from ratoon.layers.sampling import Chosen, TokenLogprobs

Tensor = torch.Tensor


class Needs(enum.IntFlag):
    """What a row needs beyond the largest logit. A row that needs nothing costs an argmax."""

    NOTHING = 0
    RANDOM = 1  # temperature
    FILTER = 2  # top_k, top_p, min_p
    ALLOWED = 4
    BAD_WORDS = 8
    MIN_TOKENS = 16  # until the row has them
    BIAS = 32
    PENALTY = 64
    LOGPROBS = 128


EDITS = Needs.ALLOWED | Needs.BAD_WORDS | Needs.MIN_TOKENS | Needs.BIAS | Needs.PENALTY
HISTORY = Needs.BAD_WORDS | Needs.PENALTY  # these look at the tokens so far


class TokenCounts:
    """The distinct tokens of a row and how often its output holds each, in arrays that grow."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._place = {int(token): place for place, token in enumerate(distinct)}
        self._tokens = np.zeros(max(64, 2 * len(distinct)), dtype=np.int64)
        self._tokens[: len(distinct)] = distinct
        self._counts = np.zeros(len(self._tokens), dtype=np.float32)

    def add(self, token_id: int) -> None:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[place] = token_id
        self._counts[place] += 1

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and their counts in the output."""
        return self._tokens[: len(self._place)], self._counts[: len(self._place)]


class BadWords:
    """Which token would complete a forbidden word. Only the output is looked at: a word that the prompt began is not
    completed by it, as in vLLM."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._always = sorted({word[0] for word in words if len(word) == 1})
        # Longer words by the token before their last, so that a step looks at few of them.
        self._longer: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        self._keep = max((len(word) - 1 for word in words), default=0)
        self._output: list[int] = []  # the last tokens, as many as the longest word needs

    def add(self, token_id: int) -> None:
        if self._keep:
            self._output.append(token_id)
            del self._output[: -self._keep]

    def forbidden(self) -> list[int]:
        matches = self._longer.get(self._output[-1], ()) if self._output else ()
        return self._always + [last for prefix, last in matches if self._output[-len(prefix) :] == prefix]


@dataclass(slots=True)
class RowEdits:
    """The parts of a row's request that change logits; None where it has no such part."""

    allowed: np.ndarray | None = None  # int64
    bad_words: BadWords | None = None
    stop_ids: np.ndarray | None = None  # held back by min_tokens
    bias_ids: np.ndarray | None = None
    bias: np.ndarray | None = None  # float32
    counts: TokenCounts | None = None


NO_EDITS = RowEdits()


class SamplingRows:
    """What the request in each slot asks for, in arrays indexed by slot. Grows when a slot lies beyond its end."""

    def __init__(self, max_slots: int) -> None:
        self.needs = np.zeros(max_slots, dtype=np.uint8)
        self.seeds = np.zeros(max_slots, dtype=np.uint64)
        self.num_outputs = np.zeros(max_slots, dtype=np.int64)
        self.min_tokens = np.zeros(max_slots, dtype=np.int64)
        self.temperature = np.zeros(max_slots, dtype=np.float32)
        self.top_k = np.zeros(max_slots, dtype=np.int64)
        self.top_p = np.ones(max_slots, dtype=np.float64)
        self.min_p = np.zeros(max_slots, dtype=np.float32)
        self.penalties = np.zeros((max_slots, 3), dtype=np.float32)  # repetition, frequency, presence
        self.num_logprobs = np.zeros(max_slots, dtype=np.int64)
        self.edits = [NO_EDITS] * max_slots

    def add(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
    ) -> None:
        """Take a branch in. `output_token_ids` is what it generated before: a resumed branch goes on where it was."""
        self._grow(slot + 1)
        edits = _edits_of(params, prompt_token_ids)
        needs = _needs_of(params, edits)
        self.edits[slot] = edits
        self.needs[slot] = needs
        self.seeds[slot] = sampling.seed_to_uint64(seed)
        self.num_outputs[slot] = len(output_token_ids)
        self.min_tokens[slot] = params.min_tokens
        self.temperature[slot] = params.temperature
        self.top_k[slot] = max(params.top_k, 0)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.penalties[slot] = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        for token_id in output_token_ids if needs & HISTORY else ():
            self._remember(slot, token_id)
        if len(output_token_ids) >= params.min_tokens:
            self.needs[slot] &= ~np.uint8(Needs.MIN_TOKENS)

    def remove(self, slot: int) -> None:
        self.needs[slot] = Needs.NOTHING
        self.edits[slot] = NO_EDITS

    def append_token(self, slot: int, token_id: int) -> None:
        self.append_tokens(np.array([slot]), np.array([token_id]))

    def append_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """One new output token for each of these slots. No slot comes twice."""
        self.num_outputs[slots] += 1
        needs = self.needs[slots]
        if not (needs & (HISTORY | Needs.MIN_TOKENS)).any():
            return
        done = slots[self.num_outputs[slots] >= self.min_tokens[slots]]
        self.needs[done] &= ~np.uint8(Needs.MIN_TOKENS)
        for place in np.flatnonzero(needs & HISTORY):
            self._remember(int(slots[place]), int(tokens[place]))

    def _remember(self, slot: int, token_id: int) -> None:
        edits = self.edits[slot]
        if edits.counts is not None:
            edits.counts.add(token_id)
        if edits.bad_words is not None:
            edits.bad_words.add(token_id)

    def _grow(self, num_slots: int) -> None:
        missing = num_slots - len(self.edits)
        if missing <= 0:
            return
        missing = max(missing, len(self.edits))  # at least double: adding slot after slot stays linear
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                room = np.zeros((missing, *value.shape[1:]), dtype=value.dtype)
                setattr(self, name, np.concatenate([value, room]))
        self.edits += [NO_EDITS] * missing


def _edits_of(params: SamplingParams, prompt_token_ids: Sequence[int]) -> RowEdits:
    edits = RowEdits()
    if params.allowed_token_ids is not None:
        edits.allowed = np.unique(np.asarray(params.allowed_token_ids, dtype=np.int64))
    if params.bad_words_token_ids:
        edits.bad_words = BadWords(params.bad_words_token_ids)
    stop_ids = {*(params.eos_token_ids or ()), *(params.stop_token_ids or ()), *(params.all_stop_token_ids or ())}
    if params.min_tokens > 0 and stop_ids:
        edits.stop_ids = np.array(sorted(stop_ids), dtype=np.int64)
    if params.logit_bias:
        edits.bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        edits.bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
    if params.repetition_penalty != 1.0:
        edits.counts = TokenCounts(prompt_token_ids)
    elif params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        edits.counts = TokenCounts(())  # these two do not look at the prompt
    return edits


def _needs_of(params: SamplingParams, edits: RowEdits) -> Needs:
    filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    answers = {
        Needs.RANDOM: not params.is_greedy,
        Needs.FILTER: not params.is_greedy and filtered,
        Needs.ALLOWED: edits.allowed is not None,
        Needs.BAD_WORDS: edits.bad_words is not None,
        Needs.MIN_TOKENS: edits.stop_ids is not None,
        Needs.BIAS: edits.bias is not None,
        Needs.PENALTY: edits.counts is not None,
        Needs.LOGPROBS: params.logprobs is not None,
    }
    return Needs(sum(need for need, answer in answers.items() if answer))


class SampledTokens:
    """One token for each row, still on the device, and what else the rows asked for.

    The first question about values (to_list, bad_rows, logprobs_lists) copies everything to the host, in one go.
    """

    def __init__(
        self,
        chosen: Chosen,
        logprobs: TokenLogprobs | None = None,
        logprob_rows: np.ndarray | None = None,  # [L] the rows that asked
        num_logprobs: np.ndarray | None = None,  # [L] how many alternatives each wants
    ) -> None:
        self.token_ids = chosen.token_ids  # [R] int64
        self.bad = chosen.bad  # [R] bool, on the device
        self._logprobs = logprobs
        self._logprob_rows = logprob_rows
        self._num_logprobs = num_logprobs
        self._host: np.ndarray | None = None

    @property
    def bad_rows(self) -> list[int]:
        """Rows without a token: NaN or infinite logits, or every token forbidden."""
        num_rows = len(self.token_ids)
        return np.flatnonzero(self._on_host()[num_rows : 2 * num_rows]).tolist()

    def to_list(self) -> list[int]:
        """The token ids."""
        return self.to_numpy().tolist()

    def to_numpy(self) -> np.ndarray:
        """The token ids, [R] int64."""
        return self._on_host()[: len(self.token_ids)].astype(np.int64)

    def logprobs_lists(self) -> dict[int, LogprobsLists]:
        """For each row that asked, by its number: its own token, then as many alternatives as it wants."""
        if self._logprobs is None or self._logprob_rows is None or self._num_logprobs is None:
            return {}
        rest = self._on_host()[2 * len(self.token_ids) :]
        lists = _logprobs_from_host(rest, self._logprobs.token_ids.shape)
        result = {}
        for place, (row, num_top) in enumerate(zip(self._logprob_rows.tolist(), self._num_logprobs.tolist())):
            ids, values = lists.token_ids[place][: num_top + 1], lists.logprobs[place][: num_top + 1]
            result[row] = LogprobsLists([ids], [values], [lists.sampled_ranks[place]])
        return result

    def _on_host(self) -> np.ndarray:
        if self._host is None:
            parts = [self.token_ids.double(), self.bad.double()]
            if self._logprobs is not None:
                parts.append(_packed(self._logprobs))
            self._host = torch.cat(parts).cpu().numpy()
        return self._host


def _packed(logprobs: TokenLogprobs) -> Tensor:
    """One flat float64 tensor: it holds ids, ranks and float32 values exactly, and needs one copy to the host."""
    return torch.cat([part.double().flatten() for part in (logprobs.token_ids, logprobs.logprobs, logprobs.ranks)])


def _logprobs_from_host(packed: np.ndarray, shape: Sequence[int]) -> LogprobsLists:
    num_cells = shape[0] * shape[1]
    token_ids = packed[:num_cells].astype(np.int64).reshape(*shape)
    logprobs = packed[num_cells : 2 * num_cells].reshape(*shape)
    return LogprobsLists(token_ids.tolist(), logprobs.tolist(), packed[2 * num_cells :].astype(np.int64).tolist())


class Sampler:
    """Chooses a token for each row of logits as the rows' requests ask."""

    def __init__(self, rows: SamplingRows) -> None:
        self.rows = rows

    def sample(self, logits: Tensor, slots: np.ndarray, seeds: np.ndarray) -> SampledTokens:
        """One token for each row of logits [R, V] float32, which stay as they are.

        `slots` [R] says whose request a row serves. A slot may come several times, each with its own entry in `seeds`
        [R] uint64: several choices from one distribution.
        """
        needs = self.rows.needs[slots]
        if not needs.any():
            return SampledTokens(sampling.greedy(logits))
        chosen = self._choose(logits, slots, seeds, needs)
        asked = np.flatnonzero(needs & Needs.LOGPROBS)
        if len(asked) == 0:
            return SampledTokens(chosen)
        num_logprobs = self.rows.num_logprobs[slots[asked]]
        asked_tokens = chosen.token_ids[_to_device(asked, logits.device)]
        logprobs = sampling.token_logprobs(_take(logits, asked), asked_tokens, int(num_logprobs.max()))
        return SampledTokens(chosen, logprobs, asked, num_logprobs)

    def _choose(self, logits: Tensor, slots: np.ndarray, seeds: np.ndarray, needs: np.ndarray) -> Chosen:
        """Sort the rows by what they need and give each group to its function."""
        uniforms = sampling.uniform(seeds, self.rows.num_outputs[slots])
        edited = (needs & EDITS) != 0
        random, filtered = (needs & Needs.RANDOM) != 0, (needs & Needs.FILTER) != 0
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        bad = torch.empty(len(slots), dtype=torch.bool, device=logits.device)
        for group in (edited, ~edited):
            members = np.flatnonzero(group)
            if len(members) == 0:
                continue
            group_logits = _take(logits, members)
            if group is edited:
                group_logits = group_logits.clone() if group_logits is logits else group_logits
                self._edit(group_logits, slots[members])
            for kind in (~random, random & ~filtered, filtered):
                places = np.flatnonzero(kind[members])
                if len(places) == 0:
                    continue
                rows = members[places]
                chosen = self._choose_alike(_take(group_logits, places), slots[rows], uniforms[rows], needs[rows[0]])
                index = _to_device(rows, logits.device)
                token_ids[index], bad[index] = chosen
        return Chosen(token_ids, bad)

    def _choose_alike(self, logits: Tensor, slots: np.ndarray, uniforms: np.ndarray, needs: int) -> Chosen:
        """For rows that all are greedy, all random, or all random and filtered."""
        if not needs & Needs.RANDOM:
            return sampling.greedy(logits)
        rows, device = self.rows, logits.device
        temperature = _to_device(rows.temperature[slots], device)
        numbers = _to_device(uniforms, device)
        if not needs & Needs.FILTER:
            return sampling.draw(logits, temperature, numbers)
        columns = (rows.top_k[slots], rows.top_p[slots], rows.min_p[slots])
        filters = sampling.Filters(*(_to_device(column, device) for column in columns))
        return sampling.draw_filtered(logits, temperature, filters, numbers)

    def _edit(self, logits: Tensor, slots: np.ndarray) -> None:
        """Change the logits of these slots in place, in vLLM's order: masks, bias, penalties."""
        needs = self.rows.needs[slots]
        edits = [self.rows.edits[slot] for slot in slots.tolist()]

        rows = np.flatnonzero(needs & Needs.ALLOWED)
        if len(rows):
            cells = _cells(logits, rows, [edits[row].allowed for row in rows])
            sampling.allow_only(logits, _to_device(rows, logits.device), *cells)
        rows = np.flatnonzero(needs & Needs.BAD_WORDS)
        if len(rows):
            sampling.forbid_tokens(logits, *_cells(logits, rows, [edits[row].bad_words.forbidden() for row in rows]))
        rows = np.flatnonzero(needs & Needs.MIN_TOKENS)
        if len(rows):
            sampling.forbid_tokens(logits, *_cells(logits, rows, [edits[row].stop_ids for row in rows]))
        rows = np.flatnonzero(needs & Needs.BIAS)
        if len(rows):
            biases = np.concatenate([edits[row].bias for row in rows])
            sampling.add_bias(logits, *_cells(logits, rows, [edits[row].bias_ids for row in rows], biases))
        rows = np.flatnonzero(needs & Needs.PENALTY)
        if len(rows):
            token_lists, count_lists = zip(*(edits[row].counts.arrays() for row in rows))
            lengths = [len(tokens) for tokens in token_lists]
            penalties = np.repeat(self.rows.penalties[slots[rows]], lengths, axis=0).T  # [3, E]
            sampling.apply_penalties(
                logits, *_cells(logits, rows, token_lists, np.concatenate(count_lists), *penalties)
            )


def _cells(
    logits: Tensor, rows: np.ndarray, token_lists: Sequence[Sequence[int] | np.ndarray], *values: np.ndarray
) -> list[Tensor]:
    """The cells (row, token) for one list of tokens a row, as row ids and token ids [E], and the cells' values.

    Tokens outside the vocabulary (placeholders in a prompt, for one) have no logit and are left out.
    """
    row_ids = np.repeat(rows, [len(tokens) for tokens in token_lists])
    token_ids = np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in token_lists])
    known = (token_ids >= 0) & (token_ids < logits.shape[1])
    return [_to_device(array[known], logits.device) for array in (row_ids, token_ids, *values)]


def _take(logits: Tensor, rows: np.ndarray) -> Tensor:
    """These rows, in rising order: the logits themselves where that is all of them, otherwise a copy."""
    if len(rows) == logits.shape[0]:
        return logits
    return logits[_to_device(rows, logits.device)]


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def prompt_logprobs(logits: Tensor, target_ids: Tensor, num_top: int) -> LogprobsLists:
    """Log-probabilities of prompt tokens: row i of logits [N, V] is what the model expected where target_ids[i] came.

    The caller brings the prompt in chunks: N·V is what this holds in memory twice over.
    """
    logprobs = sampling.token_logprobs(logits, target_ids.to(logits.device), num_top)
    return _logprobs_from_host(_packed(logprobs).cpu().numpy(), logprobs.token_ids.shape)
