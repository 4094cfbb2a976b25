"""Which inputs take so long to check that an event loop should not wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ratoon.engine.input.prompts import Prompt, PromptPair, Suffix, parse_prompt
from ratoon.models.tokenizer import LONG_TEXT

MANY_PIECES = 256  # entries of `positions`, each of which may be as long as a sequence
MANY_WORDS = 100  # that may not appear in an answer: tokenising more of them takes its time


def takes_long(prompt: Prompt | None = None, suffix: Suffix = "", params: Any = None) -> bool:
    """RequestError: the prompt has an unknown form."""
    return _is_long(suffix) or _has_many_entries(params) or (prompt is not None and _takes_long_to_read(prompt))


def _takes_long_to_read(prompt: Prompt) -> bool:
    parsed = parse_prompt(prompt)
    parts = [parsed.encoder, parsed.decoder] if isinstance(parsed, PromptPair) else [parsed]
    return any(
        part.audio is not None or (part.token_ids is None and _is_long(part.text)) for part in parts if part is not None
    )


def _has_many_entries(params: Any) -> bool:
    words, positions = getattr(params, "bad_words", None), getattr(params, "positions", None)
    if isinstance(words, list) and (len(words) > MANY_WORDS or any(map(_is_long, words))):
        return True
    return isinstance(positions, Sequence) and len(positions) > MANY_PIECES


def _is_long(text: Any) -> bool:
    return isinstance(text, str) and len(text) > LONG_TEXT
