"""Single tokens as text and as bytes, for log-probabilities. A token may be part of a character only: then its bytes
are found in the vocabulary, as far as the two usual ways of writing bytes there reach."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

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
        """The token's text and bytes. Bytes that are no text are written as OpenAI does: `bytes:\\xe2\\x9c`."""
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
    """The bytes behind a token as the vocabulary writes it; None where it writes them in a way of its own."""
    match = BYTE_TOKEN.fullmatch(token)
    if match is not None:
        return bytes.fromhex(match[1])
    alphabet = byte_level_alphabet()
    if token and all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return None
