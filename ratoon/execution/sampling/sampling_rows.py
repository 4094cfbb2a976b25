"""The sampling params of each row's request, kept between steps: numbers in arrays, and rules over logits.

execution/sampling/sampler.py samples by them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import cast

import numpy as np
import torch

from ratoon.core.params import GenerationParams, SamplingParams
from ratoon.execution.grammar.compiler import GrammarCompiler
from ratoon.execution.grammar.interface import GrammarLibrary
from ratoon.execution.rules.base import NO_RULES, LogitsRule, RowRules, Stage, apply_rules
from ratoon.execution.rules.build import rules_of
from ratoon.execution.rules.grammar import (
    FEW,
    Grammar,
    few_tokens_of,
    fill_ahead,
    forced_run,
    mask_filler,
)
from ratoon.execution.rules.grammar_batch import GrammarBatch
from ratoon.execution.rules.penalties import Penalties
from ratoon.execution.sampling.mask_column import Filling, MaskColumn
from ratoon.execution.sampling.penalty_rows import PenaltyRows
from ratoon.execution.sampling.tokens import SampledTokens, ToldTokens, UnreadTokens
from ratoon.execution.sampling.told_runs import RunsOfStep, ToldRun
from ratoon.layers import sampling

Tensor = torch.Tensor


class Needs:
    """What a row needs beyond an argmax, as bits. Plain numbers: those of an enum are slow, and this is asked for every
    request."""

    NOTHING = 0
    RANDOM = 1  # temperature
    FILTER = 2  # top_k, top_p, min_p
    LOGPROBS = 4
    EDITS = 8  # some of its rules are active
    TOKENS = 16  # its rules depend on its tokens or their number
    PENALTIES = 32  # kept on the device: it needs edits whatever its rules are
    MASK = 64  # one of its rules is a grammar that has begun
    ONLY_MASK = 128  # and it is the only one


class MasksOfStep:
    """The grammars whose masks are filled while a step's forward pass runs."""

    __slots__ = ("batch", "filling", "others", "places", "runs", "slots")

    def __init__(self, places: np.ndarray, slots: np.ndarray, runs: RunsOfStep | None) -> None:
        self.places = places  # [N] of the step's sampled rows that have one
        self.slots = slots  # [N] of these
        self.runs = runs  # None: tokens without a choice are sampled one by one
        self.filling: Filling | None = None
        # Once they are filled:
        self.batch: tuple[GrammarBatch, np.ndarray] | None = None  # with the rows of the batch
        self.others: dict[int, Grammar] = {}  # by row: those that can't go on

    def grammar_of(self, row: int) -> Grammar | None:
        if row in self.others or self.batch is None:
            return self.others.get(row)
        batch, rows = self.batch
        places = np.flatnonzero(rows == row)
        return batch.grammars[places[0]] if len(places) else None


MORE_THAN_MASKS = Needs.LOGPROBS | Needs.PENALTIES
NO_LIMIT = 1 << 62
# Arrays with an entry for each slot
OF_SLOTS = (
    "needs", "seeds", "num_outputs", "max_outputs", "temperature", "top_k", "top_p", "min_p", "num_logprobs",
    "incarnations",
)  # fmt: skip


class SamplingRows:
    """Sampling params in arrays indexed by slot. Grows when a slot is beyond its end."""

    def __init__(
        self, max_slots: int, penalties: PenaltyRows | None = None, grammars: GrammarCompiler | None = None
    ) -> None:
        """`penalties`: applies those of sampled rows in place of their rules, where there is one. `grammars`: of
        structured output."""
        self.tells_runs = False  # whether results tell tokens without a choice before a step has computed them
        self.may_be_late = True  # whether a step may leave out rows whose masks take long
        self._penalties = penalties
        self._grammars = grammars
        self.needs = np.zeros(max_slots, dtype=np.uint16)
        self.seeds = np.zeros(max_slots, dtype=np.uint64)
        self.num_outputs = np.zeros(max_slots, dtype=np.int64)
        self.max_outputs = np.zeros(max_slots, dtype=np.int64)  # tokens that its request asks for at most
        self.temperature = np.zeros(max_slots, dtype=np.float32)
        self.top_k = np.zeros(max_slots, dtype=np.int64)
        self.top_p = np.ones(max_slots, dtype=np.float64)
        self.min_p = np.zeros(max_slots, dtype=np.float32)
        self.num_logprobs = np.zeros(max_slots, dtype=np.int64)
        self.rules = [NO_RULES] * max_slots
        self.active_rules: list[Sequence[LogitsRule]] = [()] * max_slots  # those of `rules` that are active now
        self._changed: set[int] = set()  # slots with new rules, for which no mask was begun
        self._unread: list[UnreadTokens | ToldTokens] = []  # tokens that the rules of some slots have not read yet
        self._told = [ToldRun(slot, 0) for slot in range(max_slots)]
        self._told_since: deque[ToldRun] = deque()  # by results, since the last step began
        self.mask_column: MaskColumn | None = None  # of masks that are filled while the device computes
        self._masked_tokens: SampledTokens | None = None  # of the last step that has read masks
        self._batch: GrammarBatch | None = None  # the grammars of that step,
        self._batch_slots = np.zeros(0, np.int64)  # and their slots
        self.incarnations = np.zeros(max_slots, dtype=np.int64)  # how many branches a slot has had

    def add(
        self,
        slot: int,
        params: GenerationParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        encoder_token_ids: Sequence[int] = (),
    ) -> None:
        """Add a branch. `output_token_ids`: what a resumed branch generated before."""
        self._finish_masks()
        self._grow(slot + 1)
        self.incarnations[slot] += 1
        self.num_outputs[slot] = len(output_token_ids)
        self._told[slot] = ToldRun(slot, len(output_token_ids))
        self.max_outputs[slot] = NO_LIMIT if params.max_tokens is None else params.max_tokens
        self.needs[slot] = Needs.NOTHING
        if isinstance(params, SamplingParams):  # the trunk of a search is not sampled, and has only rules
            self._set_numbers(slot, params, seed)
        rules = rules_of(params, prompt_token_ids, encoder_token_ids, self._grammars)
        if self._penalties is not None and isinstance(params, SamplingParams):
            rules = self._keep_on_device(self._penalties, slot, rules, prompt_token_ids, output_token_ids)
        rules = rules.after_all(output_token_ids)
        if rules.reads:
            self.needs[slot] |= Needs.TOKENS
        self._set_rules([slot], [rules])

    def _keep_on_device(
        self, penalties: PenaltyRows, slot: int, rules: RowRules, prompt: Sequence[int], output: Sequence[int]
    ) -> RowRules:
        """Hand penalties over. Returns the other rules. Where a rule looks at what penalties leave, they stay rules."""
        if any(rule.stage > Stage.PENALTIES for rule in rules):
            return rules
        others = []
        for rule in rules:
            if isinstance(rule, Penalties):
                penalties.add(slot, rule.weights, prompt, output)
                self.needs[slot] |= Needs.PENALTIES
            else:
                others.append(rule)
        return RowRules(others) if len(others) < len(rules) else rules

    def edit(self, logits: Tensor, slots: np.ndarray) -> None:
        """Change the logits [R, V] of these slots [R] in place, as their requests ask for."""
        apply_rules(logits, [self.active_rules[slot] for slot in slots.tolist()])
        if self._penalties:
            self._penalties.apply(logits, slots)

    def few_tokens(self, slots: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds those of these places in `slots` whose rules leave few tokens and change no logit. Returns the places
        [F], and the tokens of each [F, FEW] in rising order, filled up with -1."""
        masked, words = self._masks_of(slots, places)
        found, tokens = [], []
        for place, few in zip(masked, few_tokens_of(words, self._vocab_size) if masked else ()):
            if few is not None:
                found.append(place)
                tokens.append(few)
        return np.array(found, np.int64), np.stack(tokens) if tokens else np.empty((0, FEW), np.int64)

    def masks(self, slots: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds those of these places in `slots` whose only edit is the mask of a grammar, and that are not asked for
        log-probabilities, which are those before the mask. Returns the places [N], and the masks [N, W] int32."""
        plain = places[(self.needs[slots[places]] & MORE_THAN_MASKS) == 0]
        found, words = self._masks_of(slots, plain)
        return np.array(found, np.int64), words

    def _masks_of(self, slots: np.ndarray, places: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Returns those of these places in `slots` whose only active rule is a grammar, and their masks [N, W]
        int32."""
        found, words = [], []
        for place in places.tolist():
            rules = self.active_rules[slots[place]]
            if len(rules) == 1 and isinstance(rules[0], Grammar):
                found.append(place)
                words.append(rules[0].mask())
        return found, np.stack(words) if words else np.empty((0, 0), np.int32)

    @property
    def _vocab_size(self) -> int:
        assert self._grammars is not None
        return self._grammars.library.vocab_size

    def append_on_device(self, slots: np.ndarray, token_ids: Tensor) -> None:
        """Appends the tokens of `append_tokens` to what is kept on the device. Slots that end may be among these."""
        if self._penalties:
            self._penalties.append(slots, token_ids)

    def _set_numbers(self, slot: int, params: SamplingParams, seed: int) -> None:
        self.needs[slot] = _needs_of(params)
        self.seeds[slot] = sampling.seed_to_uint64(seed)
        self.temperature[slot] = params.temperature
        is_typical = params.typical_p < 1.0  # then a rule does the work of the filters, too
        self.top_k[slot] = 0 if is_typical else max(params.top_k, 0)
        self.top_p[slot] = 1.0 if is_typical else params.top_p
        self.min_p[slot] = 0.0 if is_typical else params.min_p
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs

    def remove(self, slot: int) -> None:
        """The slot's branch is gone. One that is not sampled, which has a vector, was never added."""
        if slot >= len(self.rules):
            return
        self._finish_masks()
        if self._penalties:
            self._penalties.remove(slot)
        self.incarnations[slot] += 1
        self._told[slot] = ToldRun(slot, 0)
        self.needs[slot] = Needs.NOTHING
        self.rules[slot] = NO_RULES
        self.active_rules[slot] = ()

    def append_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """One new output token for each of these slots. Slots are distinct. A token not yet known on the host
        may be any number, in a slot whose rules do not need it there."""
        if len(slots) == 1 and not self.needs[slots[0]] & Needs.TOKENS:
            self.num_outputs[slots[0]] += 1
            return
        self.num_outputs[slots] += 1
        changing = (self.needs[slots] & Needs.TOKENS).nonzero()[0]
        if len(changing):
            changed = slots[changing].tolist()
            moves = zip(changed, tokens[changing].tolist())
            rules = [self.rules[slot].after(token_id) for slot, token_id in moves]
            self._set_rules(changed, rules)

    def append_run(self, slot: int, tokens: list[int]) -> None:
        """Several new output tokens for one slot."""
        self.num_outputs[slot] += len(tokens)
        if self._penalties:
            self._penalties.append_run(slot, tokens)
        if self.needs[slot] & Needs.TOKENS:
            self._set_rules([slot], [self.rules[slot].after_all(tokens)])

    def look_ahead(self, slot: int, tokens: Sequence[int], first_spare: int) -> list[int]:
        """Slots from `first_spare` on, one for each of these tokens, with the params of this one, as if the tokens up
        to there had followed. For one step: they are removed with `remove`."""
        spare = list(range(first_spare, first_spare + len(tokens)))
        self._grow(first_spare + len(tokens))
        rules = self.rules[slot]
        for count, (copy, token_id) in enumerate(zip(spare, tokens), start=1):
            for name in OF_SLOTS:
                values = getattr(self, name)
                values[copy] = values[slot]
            self.num_outputs[copy] += count
            if self._penalties:
                self._penalties.copy(copy, slot, tokens[:count])
            if self.needs[slot] & Needs.TOKENS:
                rules = rules.after(token_id)
            self._set_rules([copy], [rules])
        return spare

    def append_unread(self, slots: np.ndarray, tokens: SampledTokens) -> None:
        """Appends one token to each of these slots, as `append_tokens` does, while the tokens are on their way to the
        host. The rules that read them do so with `read_tokens`, before the next token is chosen; until then the device
        has other work."""
        changing = (self.needs[slots] & Needs.TOKENS).nonzero()[0]
        reading = [place for place in changing.tolist() if self.rules[slots[place]].needs_token_on_host]
        if not reading:
            self.append_tokens(slots, np.zeros(len(slots), np.int64))
            return
        others = np.delete(slots, reading)
        self.append_tokens(others, np.zeros(len(others), np.int64))
        places = np.array(reading)
        self.num_outputs[slots[places]] += 1
        self._unread.append(UnreadTokens(tokens, places, slots[places], self.incarnations[slots[places]]))

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    def read_tokens(self) -> None:
        """Wait for tokens that are on their way to rules which read them, and begin to fill the masks behind them."""
        self._finish_masks()
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        for each in unread:
            moves = [(slot, tokens) for slot, tokens in each.arrived(self.incarnations) if tokens is not None]
            self._set_rules([slot for slot, _ in moves], [self.rules[slot].after_all(tokens) for slot, tokens in moves])
        self.fill_ahead()

    # ---- tokens without a choice that results tell: see told_runs.py ----

    def runs_of(self, slots: np.ndarray, with_tails: bool = False) -> RunsOfStep:
        """What the result of a step that samples these slots may tell of those that have a grammar. `with_tails`: their
        masks are filled, for slots that are not asked for log-probabilities, which need a forward pass for each
        token."""
        rows = (self.needs[slots] & Needs.MASK).nonzero()[0]
        own = slots[rows].tolist()
        places = self.num_outputs[own].tolist()
        runs = RunsOfStep(rows.tolist(), [self._told[slot] for slot in own], places, self._told_since)
        if with_tails:
            tails = {
                row: forced_run(self.rules[slot], NO_LIMIT)[1:]
                for row, slot in zip(rows.tolist(), own)
                if not self.needs[slot] & Needs.LOGPROBS
            }
            runs.tails = {row: tail for row, tail in tails.items() if tail}
        return runs

    def expect_run(self, slot: int) -> ToldRun:
        """The tokens that a step which checks drafts will keep of this slot: its result tells them, by `tell`."""
        run = self._told[slot] = ToldRun(slot, int(self.num_outputs[slot]))
        return run

    def tell(self, run: ToldRun, tokens: list[int]) -> None:
        """Called by the thread that takes results, once for each run, before the result is handed out."""
        run.tokens = tokens
        self._told_since.append(run)

    def append_told(self) -> list[tuple[int, list[int]]]:
        """Append the tokens that results have told since the last step. Returns the slots that did not have them, and
        the tokens. Their rules read them as they read those that are on their way."""
        appended = []
        while self._told_since:
            run = self._told_since.popleft()
            slot = run.slot
            tokens = run.behind(int(self.num_outputs[slot])) if self._told[slot] is run else []
            if tokens:
                self.num_outputs[slot] += len(tokens)
                if self._penalties:
                    self._penalties.append_run(slot, tokens)
                if self.needs[slot] & Needs.TOKENS:
                    self._unread.append(ToldTokens(np.array([slot]), int(self.incarnations[slot]), tokens))
                appended.append((slot, tokens))
        return appended

    # ---- masks that are filled while the device computes ----

    def have_fast_masks(self, slots: np.ndarray) -> bool:
        """Whether the rules of these slots, and of those that have not read their tokens, are single grammars that have
        been fast: a step may wait for their masks."""
        needs = self.needs[slots]
        with_rules = (needs & (Needs.EDITS | Needs.TOKENS)) != 0
        if not (needs[with_rules] & Needs.ONLY_MASK).all():
            return False
        if self._batch is not None and np.array_equal(self._batch_slots, np.sort(slots[with_rules])):
            return True
        if not all((self.needs[unread.slots] & Needs.ONLY_MASK).all() for unread in self._unread):
            return False
        grammars = [self.rules[slot] for slot in slots[with_rules].tolist()]
        return all(rules[0].cost.is_trusted for rules in grammars if rules)

    def begin_masks(self, slots: np.ndarray) -> MasksOfStep:
        """For slots that `have_fast_masks`: read the tokens on their way, and fill the masks of those that have a
        grammar, beside the device's work. Until that is done no other method reads or changes rules."""
        assert self.mask_column is not None and self._grammars is not None
        places = (self.needs[slots] & Needs.MASK).nonzero()[0]
        unread, self._unread = self._unread, []
        masks = MasksOfStep(places, slots[places], self.runs_of(slots) if self.tells_runs else None)
        fill = partial(self._fill_masks, masks, unread, self._masked_tokens, self._grammars.library)
        masks.filling = self.mask_column.begin(len(slots), self._grammars.library.num_words, fill)
        return masks

    def append_masked(self, slots: np.ndarray, tokens: SampledTokens, masks: MasksOfStep) -> None:
        """Appends tokens as `append_unread` does, for the step that `begin_masks` was called for."""
        self.num_outputs[slots] += 1
        self._masked_tokens = tokens
        self._unread.append(UnreadTokens(tokens, masks.places, masks.slots, self.incarnations[masks.slots]))

    def _fill_masks(
        self,
        masks: MasksOfStep,
        unread: list[UnreadTokens | ToldTokens],
        before: SampledTokens | None,
        library: GrammarLibrary,
        table: np.ndarray,
    ) -> None:
        if before is not None:
            before.wait()  # the device has read the table
        order = masks.slots.argsort()  # of a batch: that of rows in a step may change
        slots, rows = masks.slots[order], masks.places[order]
        going_on = self._tokens_of_batch(slots, unread)
        if going_on is None:
            slots, rows = self._begin_batch(slots, rows, unread, library, table, masks)
        token_ids, told = (None, {}) if going_on is None else going_on
        batch = self._batch
        assert batch is not None
        masks.batch = (batch, rows)
        stuck = batch.match(token_ids, table, rows, told)
        if masks.runs is not None:
            masks.runs.tails = {int(rows[place]): run[1:] for place, run in batch.forced.items() if len(run) > 1}
        for place in stuck:
            rule = masks.others[int(rows[place])] = batch.grammars[place].stuck()
            self.rules[slots[place]] = self.active_rules[slots[place]] = RowRules((rule,))
        if stuck or batch.is_doubted:
            self._end_batch()

    def _tokens_of_batch(
        self, slots: np.ndarray, unread: list[UnreadTokens | ToldTokens]
    ) -> tuple[np.ndarray, dict[int, list[int]]] | None:
        """Wait for the tokens by which all grammars of the batch go on. Returns them and, by place, what was told
        behind them. None: there is no batch of these slots, or one of them does not go on so."""
        batch = self._batch
        if batch is None or not unread or not np.array_equal(self._batch_slots, slots):
            return None
        sampled, *others = unread
        told = [each for each in others if isinstance(each, ToldTokens) and each.slots[0] in slots]
        if not isinstance(sampled, UnreadTokens) or len(told) < len(others):
            return None
        tokens, places, slots_of_tokens, incarnations = sampled
        order = slots_of_tokens.argsort()
        if not np.array_equal(slots_of_tokens[order], slots) or (self.incarnations[slots] != incarnations[order]).any():
            return None
        tokens.wait()
        token_ids = tokens.to_numpy()[places[order]]
        if tokens.bad_rows or batch.has_end(token_ids):
            return None
        return token_ids, {int(np.searchsorted(slots, each.slots[0])): each.token_ids for each in told}

    def _begin_batch(
        self,
        slots: np.ndarray,
        rows: np.ndarray,
        unread: list[UnreadTokens | ToldTokens],
        library: GrammarLibrary,
        table: np.ndarray,
        masks: MasksOfStep,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Let each grammar read its token, and make a batch of those of these slots that can go on. Returns these, and
        their rows."""
        self._end_batch()
        for each in unread:
            for slot, token_ids in each.arrived(self.incarnations):
                rules = NO_RULES if token_ids is None else self.rules[slot].after_all(token_ids)
                self.rules[slot] = self.active_rules[slot] = rules
        found: list[Grammar] = []
        is_found = np.zeros(len(slots), bool)
        for place, (slot, row) in enumerate(zip(slots.tolist(), rows.tolist())):
            if not self.rules[slot]:  # the text has ended, and any token will do
                table[row] = -1
                continue
            grammar = cast("Grammar", self.rules[slot][0])
            if type(grammar) is Grammar and grammar.problem is None:
                found.append(grammar)
                is_found[place] = True
            else:
                masks.others[row] = grammar
                table[row] = 0
        self._batch, self._batch_slots = GrammarBatch(found, library), slots[is_found]
        return slots[is_found], rows[is_found]

    def _end_batch(self) -> None:
        if self._batch is not None:
            self._batch.settle()
            self._batch = None

    def _finish_masks(self) -> None:
        if self.mask_column is not None:
            self.mask_column.finish()
            self._end_batch()

    def fill_ahead(self) -> None:
        """Begin to fill the masks of grammars that have changed, beside what comes next."""
        if self._changed and self._grammars is not None:
            changed, self._changed = self._changed, set()
            rules = chain.from_iterable(map(self.rules.__getitem__, changed))
            fill_ahead(rules)

    def grammars_of(self, slots: np.ndarray) -> dict[int, Grammar]:
        """The grammars of these slots, by their places among them."""
        places = (self.needs[slots] & Needs.MASK).nonzero()[0].tolist()
        return {place: _grammar_of(self.rules[slots[place]]) for place in places}

    def wait_for_masks(self, grammars: Sequence[Grammar], has_others: bool) -> None:
        """Until the masks of these are filled; only briefly for those that are known to take long. `has_others`: there
        is other work for the step."""
        fill_ahead(grammars)
        if self.may_be_late:
            mask_filler().wait(grammars, for_one=not has_others)
        else:
            mask_filler().wait_for_all(grammars)

    def take_forced(self, slot: int, most: int) -> list[int]:
        """Append the tokens for which the rules leave no choice, up to so many, to a slot whose mask is filled. None
        where log-probabilities are asked for: these need a forward pass for each token."""
        tokens = self.forced_in(slot, most)
        if tokens:
            self.num_outputs[slot] += len(tokens)
            self._set_rules([slot], [self.rules[slot].after_all(tokens)])
        return tokens

    def forced_in(self, slot: int, most: int) -> list[int]:
        """Returns these tokens, and appends none."""
        if self.needs[slot] & Needs.LOGPROBS or not self.needs[slot] & Needs.MASK:
            return []
        return forced_run(self.rules[slot], min(most, int(self.max_outputs[slot] - self.num_outputs[slot])))

    def need_tokens(self, slots: np.ndarray) -> bool:
        """Whether the rules of one of these slots read its next token on the host."""
        changing = slots[(self.needs[slots] & Needs.TOKENS) != 0]
        return any(self.rules[slot].needs_token_on_host for slot in changing.tolist())

    def _set_rules(self, slots: Sequence[int], rules: Sequence[RowRules]) -> None:
        """A row without active rules for its next token is treated as one without rules."""
        for slot, row_rules in zip(slots, rules):
            needs = int(self.needs[slot]) | Needs.EDITS
            if len(row_rules) != len(self.rules[slot]) and not row_rules.reads:
                needs &= ~Needs.TOKENS
            self.rules[slot] = row_rules
            self._changed.add(slot)
            needs &= ~(Needs.MASK | Needs.ONLY_MASK)
            if any(isinstance(rule, Grammar) for rule in row_rules):
                is_single = len(row_rules) == 1 and type(row_rules[0]) is Grammar
                needs |= Needs.MASK | (Needs.ONLY_MASK if is_single else 0)
            active = self.active_rules[slot] = row_rules.active()
            if not active and not needs & Needs.PENALTIES:
                needs &= ~Needs.EDITS
            self.needs[slot] = needs

    def _grow(self, num_slots: int) -> None:
        missing = num_slots - len(self.rules)
        if missing <= 0:
            return
        missing = max(missing, len(self.rules))  # at least double, so that adding slots one by one is linear
        for name in OF_SLOTS:
            value: np.ndarray = getattr(self, name)
            setattr(self, name, np.concatenate([value, np.zeros(missing, dtype=value.dtype)]))
        self._told += [ToldRun(slot, 0) for slot in range(len(self.rules), len(self.rules) + missing)]
        self.rules += [NO_RULES] * missing
        self.active_rules += [()] * missing


def _grammar_of(rules: RowRules) -> Grammar:
    return next(rule for rule in rules if isinstance(rule, Grammar))


def _needs_of(params: SamplingParams) -> int:
    needs = Needs.NOTHING if params.logprobs is None else Needs.LOGPROBS
    if not params.is_greedy:
        needs |= Needs.RANDOM
        if params.typical_p == 1.0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0):
            needs |= Needs.FILTER
    return needs
