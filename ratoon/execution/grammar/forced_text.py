"""Text for which a grammar leaves no choice, such as the names of JSON properties: found from masks, a piece at a time.

Where all tokens that may follow are beginnings of the longest of them, the text of that one must follow. The pieces are
put together, and tokenised as the model's tokenizer would. A piece is bounded, so that a text of any length costs the
same for each of its tokens. Which token is forced depends on the state alone, not on where a piece began: the tokens
are the same one by one and many at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ratoon.execution.grammar.interface import GrammarLibrary, GrammarState, words_of

MAX_BYTES = 128  # of a piece
MAX_TOKENS = 48  # that may follow, where all are beginnings of one
FIRST_WORDS = 256  # of a mask: those of most free texts have too many tokens among these


def allowed_tokens(words: np.ndarray, vocab_size: int, most: int) -> np.ndarray | None:
    """The tokens of a mask [W] int32, in rising order. None: there are more than `most`."""
    if np.count_nonzero(words) > most:
        return None
    places = words.nonzero()[0]
    bits = np.unpackbits(words[places].view(np.uint8), bitorder="little").reshape(len(places), 32)
    cells, offsets = bits.nonzero()
    token_ids = 32 * places[cells] + offsets
    token_ids = token_ids[token_ids < vocab_size]
    return token_ids if len(token_ids) <= most else None


def longest_of_all(token_ids: Iterable[int], library: GrammarLibrary) -> int | None:
    """The token of which all of these are beginnings. None: they differ, or are special tokens, which have no text."""
    longest, text, others = -1, b"", []
    texts = library.all_token_bytes()
    for token_id in token_ids:
        if library.is_special(token_id):
            return None
        own = texts[token_id]
        others.append(own)
        if len(own) > len(text):
            longest, text = token_id, own
    return longest if text and all(map(text.startswith, others)) else None


def forced_tokens(state: GrammarState, words: np.ndarray, library: GrammarLibrary) -> list[int]:
    """The next tokens that have no alternative, behind a state whose mask is `words` [W] int32. The state stays as it
    is. There may be more behind them; an end of the text is not among them."""
    if state.is_accepting or not _may_be_forced(words, library):
        return []
    followers = allowed_tokens(words, library.vocab_size, MAX_TOKENS)
    if followers is None or len(followers) == 0:
        return []
    if len(followers) == 1 and library.is_special(int(followers[0])):
        return [int(followers[0])]
    text, is_whole = _forced_bytes(state, followers, library)
    if not text:
        return []
    tokens: list[int] = []
    while found := library.tokenize(text, is_whole):
        tokens.append(found[0])
        text = text[len(library.token_bytes(found[0])) :]
    return tokens or ([int(followers[0])] if len(followers) == 1 else [])


def _may_be_forced(words: np.ndarray, library: GrammarLibrary) -> bool:
    """Whether the first and the last token of a mask [W] int32 begin with the same byte, which most masks without
    forced text rule out. Asked of every mask, so it looks at two tokens alone."""
    if np.count_nonzero(words[:FIRST_WORDS]) > MAX_TOKENS or np.count_nonzero(words) > MAX_TOKENS:
        return False
    places = words.nonzero()[0]
    if not len(places):
        return False
    lowest, highest = int(words[places[0]]) & 0xFFFFFFFF, int(words[places[-1]]) & 0xFFFFFFFF
    first = 32 * int(places[0]) + (lowest & -lowest).bit_length() - 1
    last = 32 * int(places[-1]) + highest.bit_length() - 1
    texts = library.all_token_bytes()
    return last >= len(texts) or texts[first][:1] == texts[last][:1]


def _forced_bytes(state: GrammarState, followers: np.ndarray, library: GrammarLibrary) -> tuple[bytes, bool]:
    """Some of the forced text, and whether nothing may follow it."""
    text = b""
    probe: GrammarState | None = None
    words = np.empty(words_of(library.vocab_size), np.int32)
    while (longest := longest_of_all(followers.tolist(), library)) is not None:
        text += library.token_bytes(longest)
        if len(text) >= MAX_BYTES:
            break
        probe = state.copy() if probe is None else probe
        if not probe.consume(longest):
            break
        probe.fill(words)
        found = allowed_tokens(words, library.vocab_size, MAX_TOKENS)
        if probe.is_accepting:
            return text, found is not None and len(found) == 0
        if found is None or len(found) == 0:
            break
        followers = found
    return text, False
