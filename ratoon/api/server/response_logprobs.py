"""Log-probabilities of the tokens that the text of a response's message was made of.

An answer is cut into parts as text, not as tokens. Tokens that one output of the engine brought go to the text that
came with them; where an output ends reasoning or a call and begins the text, or the other way round, they are divided
by their lengths. Tokens of reasoning, calls, marks and ends have no place in a message, and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ratoon.api.answer_parts.parts import ContentDelta, Part
from ratoon.api.server.logprobs import TokenTexts, chat_logprobs
from ratoon.core.outputs import CompletionOutput


class Entry(NamedTuple):
    """The log-probabilities of one token."""

    content: msgspec.Raw  # as the API has it
    num_bytes: int  # of the token


class MessageLogprobs:
    """`add` each output, then `claim` for the parts that were read from it."""

    def __init__(self, texts: TokenTexts, num_top: int) -> None:
        self._texts = texts
        self._num_top = num_top
        self._waiting: list[Entry] = []  # of tokens whose text is held back, or is not a whole character yet

    def add(self, choice: CompletionOutput) -> None:
        if choice.logprobs is None:
            return
        entries = chat_logprobs(self._texts, choice.token_ids, choice.logprobs, self._num_top)
        special = self._texts.special_ids
        self._waiting += [
            Entry(content, len(self._texts.lookup(token)[1]))
            for token, content in zip(choice.token_ids, entries)
            if token not in special
        ]

    def claim(self, parts: Sequence[Part]) -> list[list[msgspec.Raw]]:
        """Returns the entries of each part; empty for parts that are no content."""
        claimed: list[list[msgspec.Raw]] = []
        for index, part in enumerate(parts):
            if not isinstance(part, ContentDelta):
                claimed.append([])
            elif len(parts) == 1:
                claimed.append(self._take(0, len(self._waiting)))
            elif index == len(parts) - 1:
                claimed.append(self._take(len(self._waiting) - _num_covering(self._waiting[::-1], part.text)))
            else:
                claimed.append(self._take(0, _num_covering(self._waiting, part.text)))
        if parts:
            self._waiting.clear()
        return claimed

    def _take(self, start: int, stop: int | None = None) -> list[msgspec.Raw]:
        taken = [entry.content for entry in self._waiting[start:stop]]
        del self._waiting[:stop]
        return taken


def _num_covering(entries: Sequence[Entry], text: str) -> int:
    """Returns how many entries it takes to write so much text."""
    num_bytes, count = len(text.encode()), 0
    for entry in entries:
        if num_bytes <= 0:
            break
        num_bytes -= entry.num_bytes
        count += 1
    return count
