"""llguidance through its C interface: the grammars of many texts go on and fill their masks by one native call.

Python's interface takes a call of its own for each step of that, and wakes threads for each. Here the threads are those
of the CPU kernels (layers/native/masks.c), which spin for a moment between calls, and Python's lock is not held.

The functions are found in the library's own extension module, which exports them. Tested with llguidance 1.9: `open`
returns None where a function is missing or the defaults of the limits are not where they should be, and for tokenizers
that the library can't read; llguidance_library.py is used then, and works with any version.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from llguidance import _lib

from ratoon.execution.grammar import forced_text
from ratoon.execution.grammar.interface import words_of
from ratoon.execution.grammar.llguidance_library import Llguidance, clear_token, describe_tokenizer
from ratoon.execution.grammar.notation import LIMITS
from ratoon.layers.native import MatchCalls, library
from ratoon.models.tokenizer import Tokenizer

_POINTER, _SIZE, _TOKEN = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32


class _Limits(ctypes.Structure):
    """LlgParserLimits."""

    _fields_ = (
        ("max_items_in_row", _SIZE),
        ("initial_lexer_fuel", ctypes.c_uint64),
        ("step_lexer_fuel", ctypes.c_uint64),
        ("step_max_items", _SIZE),
        ("max_lexer_states", _SIZE),
        ("max_grammar_size", _SIZE),
        ("precompute_large_lexemes", ctypes.c_bool),
        ("verbose_errors", ctypes.c_bool),
    )


DEFAULT_LIMITS = (2000, 1_000_000, 200_000, 50_000, 250_000, 500_000, True, True)


class _MatcherInit(ctypes.Structure):
    """LlgConstraintInit."""

    _fields_ = (
        ("tokenizer", _POINTER),
        ("log_buffer_level", ctypes.c_uint32),
        ("log_stderr_level", ctypes.c_uint32),
        ("ff_tokens_ok", ctypes.c_bool),
        ("backtrack_ok", ctypes.c_bool),
        ("limits", _Limits),
    )


class _TokenizerInit(ctypes.Structure):
    """LlgTokenizerInitV2, up to what is used of it."""

    _fields_ = (
        ("struct_size", _SIZE),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", _POINTER),
        ("token_bytes", _POINTER),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", _POINTER),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", _POINTER),
        ("slices", _POINTER),
    )


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llg_new_tokenizer_v2": (_POINTER, [_POINTER, ctypes.c_char_p, _SIZE]),
    "llg_constraint_init_set_defaults": (None, [_POINTER, _POINTER]),
    "llg_new_matcher": (_POINTER, [_POINTER, ctypes.c_char_p, ctypes.c_char_p]),
    "llg_clone_matcher": (_POINTER, [_POINTER]),
    "llg_free_matcher": (None, [_POINTER]),
    "llg_matcher_get_error": (ctypes.c_char_p, [_POINTER]),
    "llg_matcher_get_mask_byte_size": (_SIZE, [_POINTER]),
    "llg_matcher_compute_mask_into": (ctypes.c_int32, [_POINTER, _POINTER, _SIZE]),
    "llg_matcher_validate_tokens": (ctypes.c_int32, [_POINTER, _POINTER, _SIZE]),
    "llg_matcher_consume_token": (ctypes.c_int32, [_POINTER, _TOKEN]),
    "llg_matcher_rollback": (ctypes.c_int32, [_POINTER, _SIZE]),
    "llg_matcher_is_accepting": (ctypes.c_bool, [_POINTER]),
}


class _Functions:
    """AttributeError: one is missing."""

    def __init__(self) -> None:
        loaded = ctypes.CDLL(_lib.__file__)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("llg_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class CState:
    """See GrammarState."""

    __slots__ = ("_end", "_functions", "pointer")

    def __init__(self, pointer: int, functions: _Functions, end: int) -> None:
        self.pointer = pointer
        self._functions = functions
        self._end = end  # the library's own token

    def __del__(self) -> None:
        self._functions.free_matcher(self.pointer)

    def copy(self) -> CState:
        return CState(self._functions.clone_matcher(self.pointer), self._functions, self._end)

    def consume(self, token_id: int) -> bool:
        if (
            token_id < 0
            or self._functions.matcher_validate_tokens(self.pointer, ctypes.byref(_TOKEN(token_id)), 1) != 1
        ):
            return False
        return self._functions.matcher_consume_token(self.pointer, token_id) == 0

    def rewind(self, num_tokens: int) -> None:
        if num_tokens and self._functions.matcher_rollback(self.pointer, num_tokens) != 0:
            raise RuntimeError(f"a grammar can't go back by {num_tokens} tokens: {self.error}")

    def fill(self, words: np.ndarray) -> None:
        num_bytes = self._functions.matcher_get_mask_byte_size(self.pointer)
        mask = np.empty(num_bytes // 4, np.int32)
        if self._functions.matcher_compute_mask_into(self.pointer, mask.ctypes.data, num_bytes) != 0:
            raise ValueError(self.error)
        words[:] = mask[: len(words)]
        clear_token(words, self._end)

    @property
    def is_accepting(self) -> bool:
        return self._functions.matcher_is_accepting(self.pointer)

    @property
    def error(self) -> str | None:
        message = self._functions.matcher_get_error(self.pointer)
        return None if message is None else message.decode("utf-8", "replace")


class LlguidanceC(Llguidance):
    """See GrammarLibrary. What is not matching (texts of tokens, tokenising) is that of Llguidance."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Raises AttributeError, ValueError or OSError where it can't be used."""
        super().__init__(tokenizer, vocab_size)
        kernels = library()
        if kernels is None:
            raise AttributeError("the CPU kernels are not built")
        self._kernels = kernels
        self._functions = functions = _Functions()
        described, self._end = describe_tokenizer(tokenizer)
        init = _TokenizerInit(ctypes.sizeof(_TokenizerInit), self._num_tokens + 1, self._end)
        init.tokenizer_json = json.dumps(described).encode()
        init.use_approximate_greedy_tokenize_fn = True  # nothing is tokenised: no text is forced
        problem = ctypes.create_string_buffer(1024)
        made = functions.new_tokenizer_v2(ctypes.byref(init), problem, len(problem))
        if not made:
            raise ValueError(problem.value.decode("utf-8", "replace"))
        self._init = _MatcherInit()
        functions.constraint_init_set_defaults(ctypes.byref(self._init), made)
        limits = self._init.limits
        found = tuple(getattr(limits, name) for name, _ in _Limits._fields_)
        if self._init.tokenizer != made or found != DEFAULT_LIMITS:
            raise AttributeError(f"the limits of this version are others: {found}")
        self._init.log_buffer_level = self._init.log_stderr_level = 0
        for name, _ in _Limits._fields_:
            setattr(limits, name, getattr(LIMITS, name))
        addresses = [
            ctypes.cast(getattr(functions, name), _POINTER).value
            for name in ("matcher_consume_token", "matcher_compute_mask_into", "matcher_is_accepting")
        ]
        self._first_bytes = np.zeros(vocab_size, np.uint8)  # until `prepare`, all tokens begin alike
        self._calls = MatchCalls(
            *addresses, 4 * self.num_words, self._first_bytes.ctypes.data, vocab_size, forced_text.MAX_TOKENS
        )

    def prepare(self) -> None:
        super().prepare()
        self._first_bytes[:] = [text[0] if text else 0 for text in self.all_token_bytes()]

    @property
    def num_words(self) -> int:
        return words_of(self._num_tokens + 1)

    def new_state(self, text: str) -> CState:
        made = self._functions.new_matcher(ctypes.byref(self._init), b"lark", text.encode())
        return CState(made, self._functions, self._end)

    def masks(self, states: Sequence[Any]) -> np.ndarray:
        words = np.empty((len(states), self.num_words), np.int32)
        self.match(states, np.full(len(states), -1), words, np.arange(len(states)))
        return words[:, : words_of(self.vocab_size)]

    def match(self, states: Sequence[Any], token_ids: np.ndarray, table: np.ndarray, rows: np.ndarray) -> np.ndarray:
        matchers = np.array([state.pointer for state in states], np.uint64)
        tokens, places = token_ids.astype(np.int32), rows.astype(np.int32)
        found = np.zeros(len(states), np.uint8)
        self._kernels.ratoon_match_texts(
            ctypes.addressof(self._calls), matchers.ctypes.data, tokens.ctypes.data, places.ctypes.data, len(states),
            table.ctypes.data, table.shape[1], found.ctypes.data,
        )  # fmt: skip
        clear_token(table, self._end)
        return found


def open_library(tokenizer: Tokenizer, vocab_size: int) -> Llguidance:
    """By the C interface where it can be used."""
    with suppress(AttributeError, ValueError, OSError):
        return LlguidanceC(tokenizer, vocab_size)
    return Llguidance(tokenizer, vocab_size)
