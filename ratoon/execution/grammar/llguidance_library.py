"""Grammars by llguidance: compiled in milliseconds, and a mask in some tens of microseconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from ratoon.core.errors import RequestError
from ratoon.core.machine import usable_cores
from ratoon.core.structured import StructuredOutput
from ratoon.execution.grammar.interface import GrammarCost, GrammarState, Match, words_of
from ratoon.execution.grammar.notation import LIMITS, grammar_text
from ratoon.models.tokenizer import Tokenizer

END_OF_TEXT = "<[end of text]>"
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
BYTES_OF_GRAMMAR = 2**16  # the least that a compiled one takes
BYTES_PER_CHARACTER = 64  # and what each character of its text adds, roughly
TEXTS_OF_LEXER = 16
MAX_LEXERS = 4  # of a grammar,
MAX_CHARACTERS = 10_000  # if its text is no longer: compiling it takes milliseconds
# Threads that fill masks. More of them take longer to be woken than they save.
NUM_THREADS = 8
NUM_THREADS_FOR_FEW = 2
NUM_FEW = 12  # states


class State:
    """See GrammarState."""

    __slots__ = ("_end", "matcher")

    def __init__(self, matcher: LLMatcher, end: int) -> None:
        self.matcher = matcher
        self._end = end  # the library's own token

    def copy(self) -> State:
        return State(self.matcher.deep_copy(), self._end)

    def consume(self, token_id: int) -> bool:
        return self.matcher.try_consume_tokens([token_id]) == 1

    def rewind(self, num_tokens: int) -> None:
        if num_tokens and not self.matcher.rollback(num_tokens):
            raise RuntimeError(f"a grammar can't go back by {num_tokens} tokens: {self.error}")

    def fill(self, words: np.ndarray) -> None:
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.int32)
        words[:] = mask[: len(words)]
        clear_token(words, self._end)

    @property
    def is_accepting(self) -> bool:
        return self.matcher.is_accepting()

    @property
    def error(self) -> str | None:
        return self.matcher.get_error() or None


class Grammar:
    """See CompiledGrammar. The copies of a state share its lexer, which one thread uses at a time. So where masks are
    filled by several threads and many texts have the same grammar, it is compiled again for some of them."""

    def __init__(self, compile_again: Callable[[], GrammarState], num_bytes: int, max_lexers: int = 1) -> None:
        self._compile_again = compile_again
        self._firsts = [compile_again()]  # one for each lexer
        self._max_lexers = max_lexers
        self._num_texts = 0
        self.num_bytes = num_bytes
        self.cost = GrammarCost()

    def begin(self) -> GrammarState:
        self._num_texts += 1
        num_lexers = min(self._num_texts // TEXTS_OF_LEXER, self._max_lexers)
        if len(self._firsts) < num_lexers:
            self._firsts.append(self._compile_again())
        return self._firsts[self._num_texts % len(self._firsts)].copy()


class Llguidance:
    """See GrammarLibrary. The library gets an end token of its own behind those of the tokenizer: which tokens end a
    text is the request's affair."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.finds_forced_text = True
        self._tokenizer = tokenizer
        self._num_tokens = max(vocab_size, tokenizer.vocab_size)
        num_threads = max(1, min(NUM_THREADS, usable_cores() // 2))
        self._executor = LLExecutor(num_threads=num_threads)
        self._executor_for_few = LLExecutor(num_threads=min(NUM_THREADS_FOR_FEW, num_threads))
        self.special_tokens = frozenset(
            token.content for token in tokenizer.backend.get_added_tokens_decoder().values() if token.special
        )

    @cached_property
    def _library_tokenizer(self) -> LLTokenizer:
        return _library_tokenizer(self._tokenizer, self._num_tokens)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        is_special = self._library_tokenizer.is_special_token
        return frozenset(token_id for token_id in range(self._num_tokens) if is_special(token_id))

    def prepare(self) -> None:
        """Make what the first text would need, which takes some tenths of a second: its time is charged to it."""
        self._special_ids  # noqa: B018 (made on access)

    def compile(self, asked: StructuredOutput) -> Grammar:
        text = without_forcing(grammar_text(asked, self.special_tokens))

        def compile_once() -> GrammarState:
            state = self.new_state(text)
            if state.error is not None:
                raise RequestError(asked.kind or "", state.error, "")
            return state

        num_bytes = BYTES_OF_GRAMMAR + BYTES_PER_CHARACTER * len(text)
        max_lexers = min(MAX_LEXERS, usable_cores() // 2) if len(text) <= MAX_CHARACTERS else 1
        return Grammar(compile_once, num_bytes, max_lexers)

    def new_state(self, text: str) -> GrammarState:
        """The beginning of a grammar in the library's form. It may have an error."""
        matcher = LLMatcher(self._library_tokenizer, text, log_level=0, limits=LIMITS)
        return State(matcher, self._library_tokenizer.eos_token)

    def masks(self, states: Sequence[State]) -> np.ndarray:
        words = np.empty((len(states), self.num_words), np.int32)
        self._fill(states, words, range(len(states)))
        return words[:, : words_of(self.vocab_size)]

    @property
    def num_words(self) -> int:
        return words_of(self._library_tokenizer.vocab_size)

    def match(self, states: Sequence[Any], token_ids: np.ndarray, table: np.ndarray, rows: np.ndarray) -> np.ndarray:
        found = np.zeros(len(states), np.uint8)
        moving = np.flatnonzero(token_ids >= 0)
        if len(moving):
            pairs = zip(moving.tolist(), token_ids[moving].tolist())
            moves = [(states[place].matcher, token_id) for place, token_id in pairs]
            is_allowed = self._executor_of(moves).consume_token_par(moves)
            found[moving] = np.where(is_allowed, 0, Match.REFUSED)
        left = np.flatnonzero(found == 0).tolist()
        try:
            self._fill([states[place] for place in left], table, rows[left].tolist())
        except ValueError:  # because of one of them, and which is not said
            for place in left:
                with suppress(ValueError):
                    self._fill([states[place]], table, [int(rows[place])])
        for place in left:
            is_accepting = states[place].is_accepting
            good = Match.ACCEPTING if is_accepting else Match.ALIKE
            found[place] = Match.FAILED if states[place].error is not None else good
        return found

    def _fill(self, states: Sequence[State], table: np.ndarray, rows: Sequence[int]) -> None:
        if not states:
            return
        places = [(state.matcher, row) for state, row in zip(states, rows)]
        row_bytes = table.itemsize * table.shape[1]
        self._executor_of(places).unsafe_compute_mask_ptr(places, table.ctypes.data, row_bytes, len(table))
        clear_token(table, self._library_tokenizer.eos_token)

    def _executor_of(self, items: Sequence[object]) -> LLExecutor:
        return self._executor_for_few if len(items) <= NUM_FEW else self._executor

    def token_bytes(self, token_id: int) -> bytes:
        return self._library_tokenizer.decode_bytes([token_id])

    @lru_cache(1)  # noqa: B019  (a library is there once for a model)
    def all_token_bytes(self) -> list[bytes]:
        return [self.token_bytes(token_id) for token_id in range(self.vocab_size)]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def tokenize(self, text: bytes, is_whole: bool) -> list[int]:
        if is_whole:
            return self._library_tokenizer.tokenize_bytes(text)
        return self._library_tokenizer.tokenize_partial(text)[0]


def without_forcing(grammar: str) -> str:
    """Returns this grammar with a line by which the library looks for no forced text. Else it would look with each mask
    for all text that has no alternative from here on and tokenise it, which takes seconds where that is long
    ("a{99999}"), and no limit ends it. forced_text.py finds a bounded piece of it. The last such line of a grammar
    counts."""
    if grammar.startswith("{"):
        (part,) = json.loads(grammar)["grammars"]
        schema = part["json_schema"]
        grammar = part["lark_grammar"] if schema is None else "start: %json " + json.dumps(schema, ensure_ascii=False)
    return grammar + '\n%llguidance {"no_forcing": true}\n'


def clear_token(words: np.ndarray, token_id: int) -> None:
    """The bit of this token, in the mask or the masks [..., W] int32, if they reach so far."""
    if token_id // 32 < words.shape[-1]:
        words.view(np.uint32)[..., token_id // 32] &= np.uint32(0xFFFFFFFF ^ 1 << token_id % 32)


def describe_tokenizer(tokenizer: Tokenizer) -> tuple[dict[str, Any], int]:
    """The content of a `tokenizer.json` with one more token, that of the end, and its id."""
    described = json.loads(tokenizer.backend.to_str())
    added = described["added_tokens"]
    end = max([tokenizer.backend.get_vocab_size(with_added_tokens=False), *(token["id"] + 1 for token in added)])
    added.append({"id": end, "content": END_OF_TEXT, "special": True, **PLAIN})
    return described, end


def _library_tokenizer(tokenizer: Tokenizer, num_tokens: int) -> LLTokenizer:
    described, end = describe_tokenizer(tokenizer)
    try:
        return LLTokenizer(json.dumps(described), n_vocab=num_tokens + 1, eos_token=end)
    except ValueError:  # a kind of tokenizer that the library can't read: it gets the text of each token
        return LLTokenizer(TokenizerWrapper(TokenTexts(tokenizer, num_tokens)))


class TokenTexts:
    """What the library needs to know of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special_token_ids
        self.eos_token_id, self.bos_token_id = num_tokens, None
        self.tokens = [tokenizer.token_text(token).encode("utf-8", "replace") for token in range(num_tokens)]
        # A token without text would match anywhere, for ever
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if token in special or not text]
        for token in self.special_token_ids:
            self.tokens[token] = (tokenizer.id_to_token(token) or f"<[{token}]>").encode("utf-8", "replace")
        self.tokens.append(b"<[end]>")
        self.special_token_ids.append(num_tokens)

    def __call__(self, text: Any) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False)
