"""The text matches a grammar (`structured_output`): only tokens that can go on with it are possible.

A token that ends the text is possible exactly where the grammar is complete, so a text that ends by one always matches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch

from ratoon.core.structured import StructuredOutput
from ratoon.execution.cells import all_to_device
from ratoon.execution.grammar.compiler import GrammarCompiler
from ratoon.execution.grammar.interface import GrammarLibrary, GrammarState, words_of
from ratoon.execution.rules.base import ForbiddingRule, LogitsRule, Reads, Stage
from ratoon.layers import sampling

FEW = 512  # tokens; a choice among so many does not read the other logits of its row


class Path:
    """The grammar's state along one text, which all rules of that text share. It only grows, and each rule knows how
    many tokens it has consumed. A rule that is no longer the newest goes on with a copy."""

    __slots__ = ("num_tokens", "state")

    def __init__(self, state: GrammarState, num_tokens: int = 0) -> None:
        self.state = state
        self.num_tokens = num_tokens

    def at(self, num_tokens: int) -> Path:
        """Itself, or a copy as of fewer tokens."""
        if num_tokens == self.num_tokens:
            return self
        state = self.state.copy()
        state.rewind(self.num_tokens - num_tokens)
        return Path(state, num_tokens)


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

    @property
    def only(self) -> int | None:
        """The token, if it is one."""
        return next(iter(self.token_ids)) if len(self.token_ids) == 1 else None

    def set_in(self, words: np.ndarray, allowed: bool) -> None:
        """Their bits in a mask [W] int32."""
        words = words.view(np.uint32)
        for place, bits in self._bits:
            words[place] = words[place] | bits if allowed else words[place] & ~bits


class Grammar(LogitsRule):
    __slots__ = ("_ahead", "_ends", "_few", "_mask", "_num_tokens", "_path")
    stage = Stage.GRAMMAR

    def __init__(self, path: Path, ends: Ends, num_tokens: int = 0) -> None:
        self._path = path
        self._ends = ends
        self._num_tokens = num_tokens
        self._mask: np.ndarray | None = None
        self._few: np.ndarray | None = None
        self._ahead: Future[None] | None = None  # which fills the mask in another thread

    @property
    def reads(self) -> Reads:
        return Reads.TOKENS

    def after(self, token_id: int) -> Grammar | None:
        """None behind an end."""
        if token_id in self._ends.token_ids:
            return None
        if self._ahead is not None:  # the state is in use until then
            self._ahead.result()
        path = self._path.at(self._num_tokens)
        if not path.state.consume(token_id):
            return NoWay(self._path, self._ends)
        path.num_tokens += 1
        return Grammar(path, self._ends, self._num_tokens + 1)

    def mask(self) -> np.ndarray:
        """A bit for each token that may follow, [W] int32. None is set after a token that the grammar forbids."""
        self._wait_or_fill()
        assert self._mask is not None
        return self._mask

    def few_tokens(self) -> np.ndarray | None:
        """The tokens that may follow, in rising order and filled up with -1, [FEW] int64. None: there are more."""
        self._wait_or_fill()
        return self._few

    def _wait_or_fill(self) -> None:
        if self._ahead is not None:
            self._ahead.result()
        if self._mask is None:
            state, words = self._state, np.empty((1, len(self._ends.words)), np.int32)
            state.fill(words[0])
            _set_masks([self], [state], words)

    @property
    def _state(self) -> GrammarState:
        return self._path.at(self._num_tokens).state

    def forced_token(self) -> int | None:
        """The one token that may follow, where the library knows it without a mask."""
        if self._ahead is not None:
            self._ahead.result()
        state, ends = self._state, self._ends
        token_id = state.forced_token()
        if token_id is None:
            return ends.only if state.is_complete else None
        return token_id if token_id < ends.vocab_size and token_id not in ends.token_ids else None

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end may follow."""
        words = self.mask()
        return self._state.is_accepting and not (words & ~self._ends.words).any()

    @staticmethod
    def apply(logits: torch.Tensor, rows: np.ndarray, rules: Sequence[Any]) -> None:
        words = np.stack([rule.mask() for rule in rules])  # [N, W]
        sampling.allow_bits(logits, *all_to_device([rows, words], logits.device))


def forced_token(rules: Sequence[LogitsRule]) -> int | None:
    """The one token that a grammar allows next, if it is one and no other rule forbids or forces tokens. It may miss
    one: a mask would tell, but takes longer than a step without it."""
    grammar = None
    for rule in rules:
        if type(rule) is Grammar:
            grammar = rule
        elif rule.stage < Stage.BIAS:
            return None
    return None if grammar is None else grammar.forced_token()


def fill_ahead(rules: Iterable[LogitsRule], library: GrammarLibrary) -> None:
    """Fill the masks of the next tokens in another thread, beside the forward pass. They are waited for when they are
    used. The rules are of different texts."""
    new = [rule for rule in rules if type(rule) is Grammar and rule._ahead is None and rule._mask is None]
    if new:
        future = _filling_thread().submit(_fill_all, new, library)
        for rule in new:
            rule._ahead = future


def _fill_all(rules: list[Grammar], library: GrammarLibrary) -> None:
    states = [rule._state for rule in rules]
    _set_masks(rules, states, library.masks(states))


def _set_masks(rules: Sequence[Grammar], states: Sequence[GrammarState], masks: np.ndarray) -> None:
    """`masks` [N, W]: what the library allows, without ends."""
    for rule, state, words in zip(rules, states, masks):
        rule._ends.set_in(words, state.is_accepting)
    for rule, words, few in zip(rules, masks, few_tokens_of(masks, rules[0]._ends.vocab_size)):
        rule._mask, rule._few = words, few


def few_tokens_of(masks: np.ndarray, vocab_size: int) -> list[np.ndarray | None]:
    """See Grammar.few_tokens: for each of the masks [N, W]."""
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


@cache
def _filling_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="masks")


class NoWay(Grammar):
    """Behind a token that the grammar forbids, which a forced end may be: no token is possible."""

    __slots__ = ()

    def after(self, token_id: int) -> NoWay:
        return self

    def mask(self) -> np.ndarray:
        return np.zeros_like(self._ends.words)

    @property
    def is_complete(self) -> bool:
        return False


class AllSaid(NoWay):
    """Behind an end that is in the prompt: the text of a continuation was complete before."""

    __slots__ = ()

    @property
    def is_complete(self) -> bool:
        return True


class FreeText(ForbiddingRule):
    """Before the grammar: anything but an end, up to the marker (`begins_after`). The grammar begins with the token
    after the one that completes the marker."""

    __slots__ = ("_begin", "_ends", "_marker", "_tail", "_token_bytes")

    def __init__(
        self,
        marker: bytes,
        begin: Callable[[], GrammarState],
        ends: Ends,
        token_bytes: Callable[[int], bytes],
        tail: bytes = b"",
    ) -> None:
        self._marker = marker
        self._begin = begin
        self._ends = ends
        self._token_bytes = token_bytes
        self._tail = tail  # of the text, shorter than the marker

    @property
    def reads(self) -> Reads:
        return Reads.TOKENS

    def after(self, token_id: int) -> FreeText | Grammar | None:
        if token_id in self._ends.token_ids:
            return None
        text = self._tail + self._token_bytes(token_id)
        if self._marker in text:
            return Grammar(Path(self._begin()), self._ends)
        tail = text[max(0, len(text) - len(self._marker) + 1) :]
        return FreeText(self._marker, self._begin, self._ends, self._token_bytes, tail)

    def forbidden(self) -> np.ndarray:
        return self._ends.sorted_ids


def grammar_rule(
    asked: StructuredOutput, ends: Iterable[int], prompt_token_ids: Sequence[int], grammars: GrammarCompiler
) -> Grammar | FreeText:
    """The rule of a text at the end of its prompt, of which the grammar may have consumed a part."""
    library = grammars.library
    tokens_of_end = Ends(ends, library.vocab_size)
    begin = grammars.get(asked).begin
    rule: Grammar | FreeText
    if asked.begins_after is None:
        rule = Grammar(Path(begin()), tokens_of_end)
    else:
        rule = FreeText(asked.begins_after.encode(), begin, tokens_of_end, library.token_bytes)
    for token_id in () if asked.first_token is None else prompt_token_ids[asked.first_token :]:
        rule = rule.after(token_id) or AllSaid(Path(begin()), tokens_of_end)
    return rule
