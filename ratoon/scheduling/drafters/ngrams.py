"""Where the last tokens of a text occurred before: an index that grows with the text, as those of compressors do.

Positions are chained by a hash of the tokens before them, so a token takes the same time however long the text is, and
12 to 20 bytes. Candidates are compared token by token, so that equal hashes of other tokens cost time only.
"""

from __future__ import annotations

from array import array

MAX_CANDIDATES = 16  # that are compared to find the longest match
LEAST_SLOTS = 256
NO_MATCH = -1, 0


class NgramIndex:
    """Finds the longest earlier occurrence of the end of a text, in the text itself or in another one."""

    __slots__ = ("_end", "_end_slot", "_first", "_last", "_least", "_mask", "_most", "_next", "_previous", "tokens")

    def __init__(self, tokens: list[int], least: int, most: int) -> None:
        """`tokens` may grow afterwards. `least` and `most`: the tokens that must be equal, and that are compared."""
        self.tokens = tokens
        self._least = least
        self._most = most
        self._clear(len(tokens))

    def _clear(self, num_tokens: int) -> None:
        num_slots = max(LEAST_SLOTS, 1 << (2 * num_tokens - 1).bit_length())
        self._mask = num_slots - 1
        self._last = array("i", [-1]) * num_slots  # by hash: the last position behind such tokens
        self._first = self._least
        self._previous = array("i")  # by position, from `_first` on: the one before it with the same hash
        self._next = self._first  # the first position that is not in the index
        self._end, self._end_slot = -1, 0  # the last position that was looked for, and the slot of its hash

    def extend(self, max_tokens: int) -> None:
        """Adds so many of the positions that have a token behind them and are not in the index yet."""
        tokens, least = self.tokens, self._least
        if len(self._previous) * 2 > len(self._last):
            self._clear(len(tokens))
        last, mask, link = self._last, self._mask, self._previous.append
        end = min(len(tokens), self._next + max_tokens)
        if self._next == self._end < end:  # a text that grows token by token: this hash was made to look it up
            link(last[self._end_slot])
            last[self._end_slot] = self._next
            self._next += 1
        for position in range(self._next, end):
            slot = hash(tuple(tokens[position - least : position])) & mask
            link(last[slot])
            last[slot] = position
        self._next = max(self._next, end)

    def find(self, text: list[int]) -> tuple[int, int]:
        """Returns the position behind the longest match with the end of `text`, of equals the last one, and the length
        of the match, at most `most`; -1 and 0: there is none. `text` may be the indexed one: its end itself is not in
        the index."""
        least, tokens = self._least, self.tokens
        if len(text) < least:
            return NO_MATCH
        slot = hash(tuple(text[-least:])) & self._mask
        if text is tokens:
            self._end, self._end_slot = len(text), slot
        position = self._last[slot]
        if position < 0:
            return NO_MATCH
        tail: list[int] = []
        best, longest = -1, least - 1
        for _ in range(MAX_CANDIDATES):
            if position < 0:
                break
            if tokens[position - 1] != text[-1]:  # another hash in the same slot
                position = self._previous[position - self._first]
                continue
            tail = tail or text[-self._most :][::-1]
            length = 0
            for token, other in zip(tail, reversed(tokens[max(0, position - len(tail)) : position])):
                if token != other:
                    break
                length += 1
            if length > longest:
                best, longest = position, length
                if length == len(tail):
                    break
            position = self._previous[position - self._first]
        return (best, longest) if best >= 0 else NO_MATCH
