"""Text for which a grammar leaves no choice, such as the names of JSON properties: found from masks, a piece at a time,
for several texts together.

Where all tokens that may follow are beginnings of the longest of them, the text of that one must follow. The pieces are
put together, and tokenised as the model's tokenizer would. A piece is bounded, so that a text of any length costs the
same for each of its tokens. Which token is forced depends on the state alone, not on where a piece began: the tokens
are the same one by one and many at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ratoon.execution.grammar.interface import GrammarLibrary, GrammarState, Match

MAX_BYTES = 128  # of a piece
MAX_TOKENS = 48  # that may follow, where all are beginnings of one


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
    for token_id in token_ids:
        if library.is_special(token_id):
            return None
        own = library.token_bytes(token_id)
        others.append(own)
        if len(own) > len(text):
            longest, text = token_id, own
    return longest if text and all(map(text.startswith, others)) else None


class _Probe:
    """A copy of a state that goes on by what must follow."""

    __slots__ = ("followers", "is_whole", "place", "state", "text")

    def __init__(self, place: int, state: GrammarState, followers: np.ndarray) -> None:
        self.place = place
        self.state = state  # that of the text itself, until it goes on
        self.followers = followers  # the tokens that may follow
        self.text = b""  # that must follow, so far
        self.is_whole = False  # whether nothing may follow it


def forced_tokens(
    states: Sequence[GrammarState], masks: Sequence[np.ndarray], library: GrammarLibrary
) -> list[list[int]]:
    """For each of several states of this library, with its mask [W] int32: the next tokens that have no alternative.
    The states stay as they are. There may be more behind them; an end of the text is not among them."""
    found: list[list[int]] = [[] for _ in states]
    if not library.finds_forced_text:
        return found
    probes: list[_Probe] = []
    for place, (state, words) in enumerate(zip(states, masks)):
        if not _may_be_forced(words, library) or state.is_accepting:
            continue
        followers = allowed_tokens(words, library.vocab_size, MAX_TOKENS)
        if followers is None or len(followers) == 0:
            continue
        if len(followers) == 1:
            found[place] = [int(followers[0])]
        if len(followers) > 1 or not library.is_special(int(followers[0])):
            probes.append(_Probe(place, state, followers))
    _go_on(probes, library)
    for probe in probes:
        found[probe.place] = _tokens_of(probe.text, probe.is_whole, library) or found[probe.place]
    return found


def _may_be_forced(words: np.ndarray, library: GrammarLibrary) -> bool:
    """Whether the first and the last token of a mask [W] int32 begin with the same byte, which most masks without
    forced text rule out. Asked of every mask, so it looks at two tokens alone."""
    is_set = words != 0
    if not 0 < np.count_nonzero(is_set) <= MAX_TOKENS:
        return False
    places = int(is_set.argmax()), len(words) - 1 - int(is_set[::-1].argmax())
    lowest, highest = (int(words[place]) & 0xFFFFFFFF for place in places)
    first = 32 * places[0] + (lowest & -lowest).bit_length() - 1
    last = 32 * places[1] + highest.bit_length() - 1
    return last >= library.vocab_size or library.token_bytes(first)[:1] == library.token_bytes(last)[:1]


def _go_on(probes: Sequence[_Probe], library: GrammarLibrary) -> None:
    """Collect some of the forced text of each, a token at a time for all of them."""
    going = list(probes)
    while going:
        moves: list[int] = []
        moving: list[_Probe] = []
        for probe in going:
            longest = longest_of_all(probe.followers.tolist(), library)
            if longest is None:
                continue
            probe.state = probe.state if probe.text else probe.state.copy()
            probe.text += library.token_bytes(longest)
            if len(probe.text) < MAX_BYTES:
                moves.append(longest)
                moving.append(probe)
        if not moving:
            return
        table = np.empty((len(moving), library.num_words), np.int32)
        matches = library.match(
            [probe.state for probe in moving], np.array(moves, np.int64), table, np.arange(len(moving))
        )
        going = []
        for probe, match, words in zip(moving, matches.tolist(), table):
            if match & (Match.REFUSED | Match.FAILED):
                continue
            if not match & (Match.ACCEPTING | Match.ALIKE):
                continue
            followers = allowed_tokens(words, library.vocab_size, MAX_TOKENS)
            if match & Match.ACCEPTING:
                probe.is_whole = followers is not None and len(followers) == 0
            elif followers is not None and len(followers):
                probe.followers = followers
                going.append(probe)


def _tokens_of(text: bytes, is_whole: bool, library: GrammarLibrary) -> list[int]:
    """The tokens of a text, up to one that the library knows as special: a grammar means the text, and does not match
    the token that is spelled like it (`<tool_call>` in some files of Qwen's models)."""
    tokens: list[int] = []
    while text and (found := library.tokenize(text, is_whole)) and not library.is_special(found[0]):
        tokens.append(found[0])
        text = text[len(library.token_bytes(found[0])) :]
    return tokens
