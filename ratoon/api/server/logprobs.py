"""Log-probabilities in the protocol's three forms: the completions' lists, the chat's objects, and the prompt's.

What belongs to one token is encoded by itself: a long answer has hundreds of thousands of entries, whose objects take
several times as much memory as their JSON, and a response repeats them in several events.

Tokens appear in them as text and as bytes. A token may be part of a character: then its bytes are found in the
vocabulary, if that uses one of the two usual encodings of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ratoon.api.answer_parts.parts import ContentDelta, Part
from ratoon.api.server.responses import encoded
from ratoon.core.outputs import CompletionOutput, Logprob, PromptLogprobs, SampleLogprobs, TokenLogprobs
from ratoon.models.token_bound import byte_level_alphabet

if TYPE_CHECKING:
    from ratoon.models.tokenizer import Tokenizer


REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how vocabularies of the SentencePiece family write a byte


class TokenTexts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}
        self.special_ids = tokenizer.special_token_ids

    def lookup(self, token_id: int) -> tuple[str, bytes]:
        """Returns the token's text and bytes. Bytes that are no text are written as OpenAI does: `bytes:\\xe2\\x9c`."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._find(token_id)
        return found

    def _find(self, token_id: int) -> tuple[str, bytes]:
        text = self._tokenizer.token_text(token_id)
        if REPLACEMENT not in text:
            return text, text.encode("utf-8", "replace")
        raw = _vocabulary_bytes(self._tokenizer.id_to_token(token_id) or "")
        if raw is None:
            return text, text.encode("utf-8", "replace")
        try:
            return raw.decode("utf-8"), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def _vocabulary_bytes(token: str) -> bytes | None:
    """Returns the bytes of a token of the vocabulary; None if the vocabulary's encoding is unknown."""
    match = BYTE_TOKEN.fullmatch(token)
    if match is not None:
        return bytes.fromhex(match[1])
    alphabet = byte_level_alphabet()
    if token and all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return None


# ---- the three forms ----

_LOGPROB = attrgetter("logprob")
LOWEST = -9999.0  # what OpenAI writes for minus infinity, which JSON does not have


class CompletionLogprobsBuilder:
    """The lists of /v1/completions, for one choice. In a stream, offsets continue from chunk to chunk."""

    def __init__(self, texts: TokenTexts, skip_special_tokens: bool, with_ids: bool = False) -> None:
        self._texts = texts
        self._with_ids = with_ids  # the ids of tokens, too, that alternatives name by their texts
        self._skip_special_tokens = skip_special_tokens
        self._num_chars = 0

    def build(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """Returns the entries of new tokens. A position without log-probabilities (a prompt's first token) has null."""
        tokens, token_logprobs, top_logprobs, offsets = [], [], [], []
        for token_id, position in zip(token_ids, logprobs):
            text, raw = self._texts.lookup(token_id)
            shown = not (self._skip_special_tokens and token_id in self._texts.special_ids)
            tokens.append(text)
            offsets.append(self._place(raw if shown else b""))
            token_logprobs.append(None if position is None else _finite(position[token_id]))
            top_logprobs.append(None if position is None else encoded(self._by_text(position)))
        lists: dict[str, list[Any]] = {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }
        if self._with_ids:
            lists["top_token_ids"] = [
                None if position is None else encoded(self._ids_by_text(position)) for position in logprobs
            ]
        return lists

    def end_prompt(self, text: str) -> None:
        """The echoed prompt ends here, whatever the sum of its tokens' lengths."""
        self._num_chars = len(text)

    def _place(self, raw: bytes) -> int:
        """Characters are counted by their first bytes: a token from the middle of one begins where it begins."""
        first_bytes = sum(byte & 0xC0 != 0x80 for byte in raw)
        goes_on = bool(raw) and raw[0] & 0xC0 == 0x80 and self._num_chars > 0
        begin = self._num_chars - goes_on
        self._num_chars += first_bytes
        return begin

    def _by_text(self, position: TokenLogprobs) -> dict[str, float]:
        alternatives: dict[str, float] = {}
        for token_id, entry in position.items():
            alternatives.setdefault(self._texts.lookup(token_id)[0], _finite(entry))
        return alternatives

    def _ids_by_text(self, position: TokenLogprobs) -> dict[str, int]:
        ids: dict[str, int] = {}
        for token_id in position:
            ids.setdefault(self._texts.lookup(token_id)[0], token_id)
        return ids


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: SampleLogprobs, num_top: int, with_ids: bool = False
) -> list[msgspec.Raw]:
    """Returns the entries of the tokens; `with_ids`: each has its `token_id` as well."""
    content = []
    for token_id, position in zip(token_ids, logprobs):
        entry = _chat_entry(texts, token_id, position[token_id], with_ids)
        ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
        top = [item for item in ranked if item[1].rank is not None and item[1].rank <= num_top][:num_top]
        entry["top_logprobs"] = [_chat_entry(texts, *item, with_ids) for item in top]
        content.append(encoded(entry))
    return content


def prompt_logprobs(logprobs: PromptLogprobs) -> list[msgspec.Raw | None]:
    """Returns the log-probabilities of a prompt, by token id."""
    return [
        None if position is None else encoded(position if _is_finite(position) else _bounded(position))
        for position in logprobs
    ]


def _is_finite(position: TokenLogprobs) -> bool:
    return min(map(_LOGPROB, position.values()), default=0.0) >= LOWEST


def _bounded(position: TokenLogprobs) -> TokenLogprobs:
    return {token_id: replace(entry, logprob=_finite(entry)) for token_id, entry in position.items()}


def _chat_entry(texts: TokenTexts, token_id: int, entry: Logprob, with_id: bool) -> dict[str, Any]:
    text, raw = texts.lookup(token_id)
    told = {"token": text, "logprob": _finite(entry), "bytes": list(raw)}
    return {**told, "token_id": token_id} if with_id else told


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LOWEST)


# ---- of a response's message ----
# An answer is cut into parts as text, not as tokens. Tokens that one output of the engine brought go to the text that
# came with them; where an output ends reasoning or a call and begins the text, or the other way round, they are divided
# by their lengths. Tokens of reasoning, calls, marks and ends have no place in a message, and are left out.


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
