"""The text matches a grammar (`structured_output`): only tokens that can go on with it are possible.

A token that ends the text is possible exactly where the grammar is complete, so a text that ends by one always matches.
Masks are filled by other threads (mask_filler.py).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch

from ratoon.core.structured import StructuredOutput
from ratoon.execution.grammar.compiler import GrammarCompiler, KeptGrammar
from ratoon.execution.grammar.forced_text import allowed_tokens, forced_tokens
from ratoon.execution.grammar.interface import FAST_SECONDS, GrammarCost, GrammarLibrary, GrammarState, words_of
from ratoon.execution.grammar.markers import Marker, marker_of
from ratoon.execution.inputs.cells import all_to_device
from ratoon.execution.rules.base import ForbiddingRule, LogitsRule, Reads, Stage
from ratoon.execution.rules.mask_filler import MaskFiller
from ratoon.layers import sampling

FEW = 512  # tokens; a choice among so many does not read the other logits of its row

# What the masks of one text may take in all: seconds of processor time, where they are measured.
SECONDS_OF_TEXT = 0.5
SECONDS_OF_TOKEN = 0.005

# What the library keeps of a mask that took long, for each second: 50 to 100 MB were measured.
BYTES_OF_SECOND = 10**8

NOT_MATCHED = "allows no token here: no text that begins like this one matches it"


class Source:
    """Where a grammar's states come from."""

    __slots__ = ("compiled", "library")

    def __init__(self, compiled: KeptGrammar, library: GrammarLibrary) -> None:
        self.compiled = compiled
        self.library = library

    def begin(self) -> Path:
        return Path(self.compiled.begin(), self)


class Path:
    """The grammar's state along one text, which all rules of that text share. It only grows, and each rule knows how
    many tokens it has consumed. A rule that is no longer the newest goes on with a copy."""

    __slots__ = ("num_tokens", "seconds", "source", "state")

    def __init__(self, state: GrammarState, source: Source, num_tokens: int = 0, seconds: float = 0.0) -> None:
        self.state = state
        self.source = source
        self.num_tokens = num_tokens
        self.seconds = seconds  # of processor time that its masks have taken, where they were measured

    def at(self, num_tokens: int) -> Path:
        """Itself, or a copy as of fewer tokens."""
        if num_tokens == self.num_tokens:
            return self
        state = self.state.copy()
        state.rewind(self.num_tokens - num_tokens)
        return Path(state, self.source, num_tokens, self.seconds)


class Ends:
    """The tokens that end the text, and the size of the vocabulary."""

    __slots__ = ("_bits", "sorted_ids", "token_ids", "vocab_size", "words")

    def __init__(self, token_ids: Iterable[int], vocab_size: int) -> None:
        self.token_ids = frozenset(token_ids)
        self.vocab_size = vocab_size
        self.sorted_ids = np.array(sorted(self.token_ids), np.int64)
        self.words = np.zeros(words_of(vocab_size), np.int32)
        bits = self.words.view(np.uint32)
        for token in self.token_ids:
            bits[token // 32] |= np.uint32(1 << token % 32)
        self._bits = [(place, bits[place]) for place in bits.nonzero()[0].tolist()]

    def cut(self, forced: list[int], words: np.ndarray | None) -> list[int]:
        """Tokens without an alternative, up to one that would end the text or that the model does not have. `words`:
        the mask of a text that may end here; if nothing else is possible, and it is one token, that one is forced."""
        if words is not None:
            alone = allowed_tokens(words, self.vocab_size, 1)
            return [] if alone is None else alone.tolist()
        for count, token_id in enumerate(forced):
            if token_id in self.token_ids or token_id >= self.vocab_size:
                return forced[:count]
        return forced

    def set_in_rows(self, table: np.ndarray, rows: np.ndarray, allowed: np.ndarray) -> None:
        """Their bits in these rows [N] of a table of masks [R, W] int32."""
        words = table.view(np.uint32)
        for place, bits in self._bits:
            column = words[rows, place]
            words[rows, place] = np.where(allowed, column | bits, column & ~bits)

    def set_in(self, words: np.ndarray, allowed: bool) -> None:
        """Their bits in a mask [W] int32."""
        words = words.view(np.uint32)
        for place, bits in self._bits:
            words[place] = words[place] | bits if allowed else words[place] & ~bits


@lru_cache(64)  # most requests of a model have the same
def ends_of(token_ids: frozenset[int], vocab_size: int) -> Ends:
    return Ends(token_ids, vocab_size)


class Grammar(LogitsRule):
    """It is filled when its mask is known, and the tokens without an alternative."""

    __slots__ = (
        "_ends",
        "_forced",
        "_is_queued",
        "_mask",
        "_num_tokens",
        "_path",
        "cost",
        "is_filled",
        "problem",
    )
    stage = Stage.GRAMMAR

    def __init__(self, path: Path, ends: Ends, num_tokens: int = 0) -> None:
        self._path = path
        self._ends = ends
        self._num_tokens = num_tokens
        self.cost: GrammarCost = path.source.compiled.cost
        self.problem: str | None = None  # why no token is possible: a limit
        self.is_filled = False
        self._is_queued = False  # to be filled by another thread, which has the state until then
        self._mask: np.ndarray | None = None
        self._forced: list[int] = []

    @property
    def reads(self) -> Reads:
        return Reads.TOKENS

    def after(self, token_id: int) -> Grammar | None:
        """None behind an end."""
        if token_id in self._ends.token_ids:
            return None
        if self._is_queued and not self.is_filled:
            mask_filler().wait_for_all([self])
        path = self._path.at(self._num_tokens)
        if not path.state.consume(token_id):
            return DeadEnd(path, self._ends, path.state.error)
        path.num_tokens += 1
        rule = Grammar(path, self._ends, self._num_tokens + 1)
        if len(self._forced) > 1 and token_id == self._forced[0]:  # what follows is known without a mask
            rule._set_forced(self._forced[1:])
            rule.is_filled = True
        return rule

    def mask(self) -> np.ndarray:
        """A bit for each token that may follow, [W] int32. None is set after a token that the grammar forbids."""
        self.wait_or_fill()
        assert self._mask is not None
        return self._mask

    def forced_tokens(self) -> list[int]:
        """The next tokens, where they have no alternative."""
        self.wait_or_fill()
        return self._forced

    def wait_or_fill(self) -> None:
        if not self.is_filled:
            if self._is_queued:
                mask_filler().wait_for_all([self])
            else:
                self.fill()
                self.is_filled = True

    @property
    def ends(self) -> Ends:
        return self._ends

    def stuck(self) -> DeadEnd:
        """The rule in its place, where its state can't be used any more."""
        return DeadEnd(self._path, self._ends, self.problem or self._path.state.error)

    def newest_state(self) -> GrammarState:
        """The state behind the text's last token. No other thread has it."""
        if self._is_queued and not self.is_filled:
            mask_filler().wait_for_all([self])
        self._path = self._path.at(self._num_tokens)
        return self._path.state

    def note_moved(self, num_tokens: int) -> None:
        """Its own state has consumed so many tokens: see grammar_batch.py."""
        self._path.num_tokens += num_tokens
        self._num_tokens += num_tokens
        self.is_filled = self._is_queued = False
        self._mask, self._forced = None, []

    def queue(self) -> bool:
        """Whether it should be filled by another thread now: it is not yet, and none does so."""
        if self.is_filled or self._is_queued:
            return False
        self._is_queued = True
        return True

    def fill(self) -> None:
        words = np.zeros((1, len(self._ends.words)), np.int32)
        try:
            state = self._state
            state.fill(words[0])
            _set_masks([self], [state], words, self._path.source.library)
        except Exception as error:  # of the library, about this grammar
            self._fail(str(error))

    def note_seconds(self, seconds: float) -> None:
        self.cost.note(seconds)
        if seconds >= FAST_SECONDS:
            self._path.source.compiled.note_growth(int(BYTES_OF_SECOND * seconds))
        path = self._path
        path.seconds += seconds
        if path.seconds > SECONDS_OF_TEXT + SECONDS_OF_TOKEN * self._num_tokens:
            limit = f"{SECONDS_OF_TEXT:g} s and {1000 * SECONDS_OF_TOKEN:g} ms for each token"
            self._fail(f"takes longer to match than is allowed ({limit})")

    def _set_forced(self, tokens: list[int]) -> None:
        """These must follow. Also where it is sampled, the first is the only one that is possible."""
        self._forced = tokens
        self._mask = np.zeros_like(self._ends.words)
        self._mask.view(np.uint32)[tokens[0] // 32] = 1 << tokens[0] % 32

    def _fail(self, problem: str) -> None:
        self.problem = " ".join(problem.split())
        self._mask = np.zeros_like(self._ends.words)
        self._forced = []

    @property
    def _state(self) -> GrammarState:
        return self._path.at(self._num_tokens).state

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end may follow."""
        words = self.mask()
        return self.problem is None and self._state.is_accepting and not (words & ~self._ends.words).any()

    @staticmethod
    def apply(logits: torch.Tensor, rows: np.ndarray, rules: Sequence[Any]) -> None:
        words = np.stack([rule.mask() for rule in rules])  # [N, W]
        sampling.allow_bits(logits, *all_to_device([rows, words], logits.device))


def forced_run(rules: Sequence[LogitsRule], most: int) -> list[int]:
    """The next tokens, up to so many, for which a grammar leaves no choice, if no other rule forbids or forces
    tokens. Its mask is filled, or is filled now."""
    grammar = None
    for rule in rules:
        if type(rule) is Grammar:
            grammar = rule
        elif rule.stage < Stage.BIAS:
            return []
    return [] if grammar is None else grammar.forced_tokens()[:most]


def fill_ahead(rules: Iterable[LogitsRule]) -> None:
    """Fill the masks of the next tokens in other threads. The rules are of different texts."""
    queued = [rule for rule in rules if isinstance(rule, Grammar) and rule.queue()]
    if queued:
        mask_filler().begin(queued)


def fill_and_wait(rules: Sequence[Grammar]) -> None:
    """Fill the masks of all of these, in other threads."""
    if rules:
        fill_ahead(rules)
        mask_filler().wait_for_all(rules)


def _fill_many(rules: Sequence[Any]) -> None:
    """Fills the masks of trusted grammars. If the library fails for all together, each is filled alone."""
    for library, group in groupby(rules, lambda rule: rule._path.source.library):
        members: list[Grammar] = list(group)
        try:
            states = [rule._state for rule in members]
            _set_masks(members, states, library.masks(states), library)
        except Exception:
            for rule in members:
                rule.fill()


@cache
def mask_filler() -> MaskFiller:
    filler = MaskFiller(_fill_many)
    atexit.register(filler.close)
    return filler


os.register_at_fork(after_in_child=mask_filler.cache_clear)  # threads stay in the parent


def _set_masks(
    rules: Sequence[Grammar], states: Sequence[GrammarState], masks: np.ndarray, library: GrammarLibrary
) -> None:
    """`masks` [N, W]: what the library allows, without ends. Text without an alternative gets the tokens of the
    tokenizer, not any that the model prefers, and so the same ones where it is appended at once."""
    errors = [state.error for state in states]
    good = [place for place, error in enumerate(errors) if error is None]
    runs = dict(zip(good, forced_tokens([states[place] for place in good], [masks[place] for place in good], library)))
    for place, (rule, state, words) in enumerate(zip(rules, states, masks)):
        if place not in runs:
            rule._fail(errors[place] or "")
            continue
        is_accepting, forced = state.is_accepting, runs[place]
        rule._ends.set_in(words, is_accepting)
        rule._mask = words
        forced = rule._ends.cut(forced, words if is_accepting else None)
        if forced:
            rule._set_forced(forced)


def few_tokens_of(masks: np.ndarray, vocab_size: int) -> list[np.ndarray | None]:
    """For each of the masks [N, W] the tokens that may follow, in rising order and filled up with -1, [FEW] int64.
    None: there are more."""
    found: list[np.ndarray | None] = [None] * len(masks)
    sparse = np.flatnonzero(np.count_nonzero(masks, axis=1) <= FEW)
    rows, places = masks[sparse].nonzero()
    words = masks[sparse[rows], places]
    bits = np.unpackbits(words.view(np.uint8), bitorder="little").reshape(len(words), 32)
    cells, offsets = bits.nonzero()
    rows, token_ids = rows[cells], 32 * places[cells] + offsets
    if len(token_ids) and vocab_size % 32:
        rows, token_ids = rows[token_ids < vocab_size], token_ids[token_ids < vocab_size]
    ends = np.cumsum(np.bincount(rows, minlength=len(sparse)))
    for row, own in zip(sparse.tolist(), np.split(token_ids, ends[:-1])):
        if len(own) <= FEW:
            found[row] = few = np.full(FEW, -1, np.int64)
            few[: len(own)] = own
    return found


class DeadEnd(Grammar):
    """Behind a token that the grammar forbids, which a forced end may be, or that is beyond one of its limits: no token
    is possible."""

    __slots__ = ()

    def __init__(self, path: Path, ends: Ends, problem: str | None = None) -> None:
        super().__init__(path, ends)
        self._fail(NOT_MATCHED if problem is None else problem)
        self.is_filled = True

    def after(self, token_id: int) -> DeadEnd:
        return self

    @property
    def is_complete(self) -> bool:
        return False


class CompleteText(DeadEnd):
    """Behind an end that is in the prompt: the text of a continuation was complete before."""

    __slots__ = ()

    def __init__(self, path: Path, ends: Ends) -> None:
        super().__init__(path, ends)
        self.problem = None

    @property
    def is_complete(self) -> bool:
        return True


class FreeText(ForbiddingRule):
    """Before the grammar: anything but an end, up to the marker (`begins_after`). What stands behind the marker in the
    token that completes it belongs to the grammar's text."""

    __slots__ = ("_ends", "_forbidden", "_marker", "_source", "_tail")

    def __init__(self, marker: Marker, source: Source, ends: Ends, tail: bytes = b"") -> None:
        self._marker = marker
        self._source = source
        self._ends = ends
        self._tail = tail  # of the text, shorter than the marker
        self._forbidden: np.ndarray | None = None

    @property
    def reads(self) -> Reads:
        return Reads.TOKENS

    def after(self, token_id: int) -> FreeText | Grammar | None:
        if token_id in self._ends.token_ids:
            return None
        library = self._source.library
        text = self._tail + library.token_bytes(token_id)
        rest = self._marker.split(text)
        if rest is None or (rest and library.is_special(token_id)):  # the name of a special token is no text
            return FreeText(self._marker, self._source, self._ends, self._marker.tail(text))
        state = self._marker.begun(self._source.compiled.begin, rest)
        if state is None:
            return DeadEnd(self._source.begin(), self._ends)
        return Grammar(Path(state, self._source), self._ends)

    def forbidden(self) -> np.ndarray:
        if self._forbidden is None:
            more = self._marker.forbidden_after(self._tail, self._source.compiled.begin)
            ends = self._ends.sorted_ids
            self._forbidden = np.unique(np.concatenate([ends, np.array(more, np.int64)])) if more else ends
        return self._forbidden


def grammar_rule(
    asked: StructuredOutput,
    ends: Iterable[int],
    prompt_token_ids: Sequence[int],
    grammars: GrammarCompiler,
) -> Grammar | FreeText:
    """The rule of a text at the end of its prompt, of which the grammar may have consumed a part."""
    library = grammars.library
    tokens_of_end = ends_of(frozenset(ends), library.vocab_size)
    source = Source(grammars.get(asked), library)
    rule: Grammar | FreeText
    if asked.begins_after is None:
        rule = Grammar(source.begin(), tokens_of_end)
    else:
        rule = FreeText(marker_of(asked.begins_after, library), source, tokens_of_end)
    for token_id in () if asked.first_token is None else prompt_token_ids[asked.first_token :]:
        rule = rule.after(token_id) or CompleteText(source.begin(), tokens_of_end)
    return rule
