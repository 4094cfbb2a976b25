"""Grammars by llguidance: compiled in milliseconds, and a mask in some tens of microseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput
from ratoon.execution.grammar.interface import GrammarCost, words_of
from ratoon.execution.grammar.notation import LIMITS, grammar_text
from ratoon.models.tokenizer import Tokenizer

END_OF_TEXT = "<[end of text]>"
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
BYTES_OF_GRAMMAR = 2**16  # the least that a compiled one takes
BYTES_PER_CHARACTER = 64  # and what each character of its text adds, roughly


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
        _clear(words, self._end)

    @property
    def is_accepting(self) -> bool:
        return self.matcher.is_accepting()

    @property
    def error(self) -> str | None:
        return self.matcher.get_error() or None


class Grammar:
    """See CompiledGrammar."""

    def __init__(self, matcher: LLMatcher, end: int, num_bytes: int) -> None:
        self._first = State(matcher, end)
        self.num_bytes = num_bytes
        self.cost = GrammarCost()

    def begin(self) -> State:
        return self._first.copy()


class Llguidance:
    """See GrammarLibrary. The library gets an end token of its own behind those of the tokenizer: which tokens end a
    text is the request's affair."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        num_tokens = max(vocab_size, tokenizer.vocab_size)
        self._library_tokenizer = _library_tokenizer(tokenizer, num_tokens)
        self._executor = LLExecutor()
        self._special_ids = frozenset(
            token_id for token_id in range(num_tokens) if self._library_tokenizer.is_special_token(token_id)
        )
        self.special_tokens = frozenset(
            token.content for token in tokenizer.backend.get_added_tokens_decoder().values() if token.special
        )

    def compile(self, asked: StructuredOutput) -> Grammar:
        text = without_forcing(grammar_text(asked, self.special_tokens))
        matcher = LLMatcher(self._library_tokenizer, text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise RequestError(asked.kind or "", matcher.get_error(), "")
        num_bytes = BYTES_OF_GRAMMAR + BYTES_PER_CHARACTER * len(text)
        return Grammar(matcher, self._library_tokenizer.eos_token, num_bytes)

    def masks(self, states: Sequence[State]) -> np.ndarray:
        num_words = words_of(self._library_tokenizer.vocab_size)
        words = np.empty((len(states), num_words), np.int32)
        places = [(state.matcher, place) for place, state in enumerate(states)]
        self._executor.unsafe_compute_mask_ptr(places, words.ctypes.data, words.itemsize * num_words, len(states))
        words = words[:, : words_of(self.vocab_size)]
        _clear(words, self._library_tokenizer.eos_token)
        return words

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
    """The same grammar for a library that looks for no forced text. With each mask it would look for all text that
    has no alternative from here on and tokenise it, which takes seconds where that is long ("a{99999}"), and no limit
    ends it. forced_text.py finds a bounded piece of it. The last such line of a grammar counts."""
    if grammar.startswith("{"):
        (part,) = json.loads(grammar)["grammars"]
        schema = part["json_schema"]
        grammar = part["lark_grammar"] if schema is None else "start: %json " + json.dumps(schema, ensure_ascii=False)
    return grammar + '\n%llguidance {"no_forcing": true}\n'


def _clear(words: np.ndarray, token_id: int) -> None:
    """The bit of this token, in the mask or the masks [..., W] int32, if they reach so far."""
    if token_id // 32 < words.shape[-1]:
        words.view(np.uint32)[..., token_id // 32] &= np.uint32(0xFFFFFFFF ^ 1 << token_id % 32)


def _library_tokenizer(tokenizer: Tokenizer, num_tokens: int) -> LLTokenizer:
    described = json.loads(tokenizer.backend.to_str())
    added = described["added_tokens"]
    end = max([tokenizer.backend.get_vocab_size(with_added_tokens=False), *(token["id"] + 1 for token in added)])
    added.append({"id": end, "content": END_OF_TEXT, "special": True, **PLAIN})
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
