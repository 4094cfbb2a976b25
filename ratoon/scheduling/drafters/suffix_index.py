"""An index over texts (tokens) that finds where the longest suffix of another text occurs in them.

Texts with a common beginning share it: they form a tree, in which a text that goes on behind another one (the next turn
of a conversation) adds only what is new, and one that differs from some token on is a branch. Every token is a place,
found by the ANCHOR tokens before it: a table has the newest place behind these tokens, and each place links to the one
before it, as in the hash chains of deflate. Taking a text out of the middle of its chains takes constant time a token.

Linking and unlinking are done in slices (`work`), so that a long text does not hold up what else the thread has to do.
A text is not found before it is linked; one that was taken out is not found from that moment on.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

ANCHOR = 3  # tokens of the shortest suffix that is looked up
MAX_SUFFIX = 64  # longer matches count as equally long
MAX_HOPS = 16  # places behind the same anchor that are compared, the newest first
MAX_PLACES = 4  # of the longest match that are returned

# Bytes, measured with tracemalloc (test_roots_drafter.py compares)
TOKEN_BYTES = 22  # the token and two links, with the space that arrays keep for growth
ANCHOR_BYTES = 120  # an entry of the table: key, place, and its part of the table, which is a third to two thirds full
NODE_BYTES = 700  # a run of tokens with its tables
TEXT_BYTES = 300  # a name and its place in tables
INDEX_BYTES = 3000  # an empty index

_TOKEN_BITS = 20
_ANCHOR_MASK = (1 << ANCHOR * _TOKEN_BITS) - 1
_POSITION_BITS = 32
_POSITION_MASK = (1 << _POSITION_BITS) - 1
_NOWHERE = -1


class Node:
    """A run of tokens in the tree. It goes on behind the first `parent_length` tokens of its parent."""

    __slots__ = ("children", "earlier", "later", "length", "number", "parent", "parent_length", "texts", "tokens",
                 "way_out")  # fmt: skip

    def __init__(self, number: int, parent: Node | None, parent_length: int, tokens: array[int]) -> None:
        self.number = number
        self.parent = parent
        self.parent_length = parent_length
        self.tokens = tokens
        self.length = len(tokens)  # of the tokens, those that belong to a text; the others wait to be unlinked
        self.children: dict[int, dict[int, Node]] = {}  # by where they branch off and their first token
        self.texts: dict[str, int] = {}  # texts that end here, with the number of this run's tokens that they have
        self.way_out: dict[int, int] = {}  # how many texts leave the run behind so many tokens: they end, or branch off
        # Places of the tokens that are linked so far: the next older and the next newer one behind the same anchor
        self.earlier = array("q")
        self.later = array("q")

    def before(self, position: int, count: int) -> array[int]:
        """Returns the `count` tokens before this position, or fewer where the text begins."""
        node, tokens = self, self.tokens[max(0, position - count) : position]
        while len(tokens) < count and node.parent is not None:
            end, node = node.parent_length, node.parent
            tokens = node.tokens[max(0, end - count + len(tokens)) : end] + tokens
        return tokens

    def token_before(self, position: int) -> int:
        """Returns the token before this position, which may lie in the runs before this one; -1: the text begins."""
        if position > 0:
            return self.tokens[position - 1]
        tokens = self.before(0, 1 - position)
        return tokens[0] if len(tokens) > -position else -1

    def run_from(self, position: int, most: int) -> list[int]:
        """Returns the tokens from this position on, at most so many, up to where another run branches off."""
        end = min(position + most, self.length)
        if self.children:
            end = min([at for at in self.children if at > position] + [end])
        return self.tokens[position:end].tolist()

    def num_texts_at(self, position: int) -> int:
        """Returns the number of texts that have the token at this position."""
        return sum(count for length, count in self.way_out.items() if length > position)

    def count_text(self, length: int, change: int) -> None:
        """A text that has so many tokens of this run comes (1) or goes (-1)."""
        node: Node | None = self
        while node is not None:
            count = node.way_out.get(length, 0) + change
            if count:
                node.way_out[length] = count
            else:
                del node.way_out[length]
            length, node = node.parent_length, node.parent


Place: TypeAlias = tuple[Node, int]  # a token of a run


class Match(NamedTuple):
    """Where the longest suffix occurs: the tokens behind it, the newest first, and its own number of tokens."""

    places: list[Place]
    length: int


NO_MATCH = Match([], 0)


class SuffixIndex:
    def __init__(self) -> None:
        self._top = Node(0, None, 0, array("i"))  # no tokens; texts begin behind it
        self._nodes: dict[int, Node] = {}
        self._num_nodes_made = 0
        self._ends: dict[str, Node] = {}  # of each text, the run in which it ends
        self._newest: dict[int, int] = {}  # the newest place behind each anchor
        self._to_link: deque[Node] = deque()
        self._to_unlink: deque[tuple[Node, int]] = deque()  # with how many of the run's tokens stay
        self.num_cuts = 0  # changes when texts are taken out: places that were found before may be none any more
        self._num_tokens = 0  # in all runs, those that wait to be unlinked included

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, name: str) -> bool:
        return name in self._ends

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, those tokens included that wait to be unlinked."""
        own = INDEX_BYTES + NODE_BYTES * len(self._nodes) + TEXT_BYTES * len(self._ends)
        return own + TOKEN_BYTES * self._num_tokens + ANCHOR_BYTES * len(self._newest)

    # ---- texts ----

    def add(self, name: str, token_ids: Sequence[int]) -> None:
        """Adds a text, in the place of one that has its name. It is found when `work` has linked it."""
        self.remove(name)
        if not token_ids:
            return
        tokens = array("i", token_ids)
        node, length, num_shared = self._descend(tokens)
        if num_shared < len(tokens):
            node, length = self._grow(node, length, tokens[num_shared:])
        node.texts[name] = length
        self._ends[name] = node
        node.count_text(length, 1)

    def _descend(self, tokens: array[int]) -> tuple[Node, int, int]:
        """Returns how far the tree has this text: the run, the number of the run's tokens, and of the text's."""
        node, length, num_shared = self._top, 0, 0
        while num_shared < len(tokens):
            child = node.children.get(length, {}).get(tokens[num_shared])
            if child is None:
                break
            node, length = child, _common_length(child, tokens, num_shared)
            num_shared += length
        return node, length, num_shared

    def _grow(self, node: Node, length: int, tokens: array[int]) -> tuple[Node, int]:
        """Puts tokens behind the first `length` ones of a run."""
        if node is not self._top and length == len(node.tokens):
            node.tokens.extend(tokens)
            node.length = len(node.tokens)
        else:
            self._num_nodes_made += 1
            child = Node(self._num_nodes_made, node, length, tokens)
            node.children.setdefault(length, {})[tokens[0]] = self._nodes[child.number] = child
            node = child
        self._num_tokens += len(tokens)
        self._to_link.append(node)
        return node, node.length

    def remove(self, name: str) -> None:
        """Takes a text out: what no other text has is not found any more, and `work` frees its memory."""
        node = self._ends.pop(name, None)
        if node is None:
            return
        node.count_text(node.texts.pop(name), -1)
        while node is not self._top:
            length = max(node.way_out, default=0)
            if length == node.length:
                return
            node.length = length
            # In this order: the anchors of a run's first tokens are in the run before it
            self._to_unlink.append((node, length))
            self.num_cuts += 1
            assert node.parent is not None
            if length > 0:
                return
            siblings = node.parent.children[node.parent_length]
            del siblings[node.tokens[0]]
            if not siblings:
                del node.parent.children[node.parent_length]
            node = node.parent

    # ---- links ----

    @property
    def is_freeing(self) -> bool:
        """Whether there are tokens to unlink."""
        return bool(self._to_unlink)

    @property
    def has_work(self) -> bool:
        return bool(self._to_unlink) or bool(self._to_link)

    def work(self, num_tokens: int) -> int:
        """Links or unlinks at most so many tokens. Returns how many of them there was nothing to do for."""
        while num_tokens > 0 and self._to_unlink:
            num_tokens = self._unlink(*self._to_unlink[0], num_tokens)
        while num_tokens > 0 and self._to_link:
            num_tokens = self._link(self._to_link[0], num_tokens)
        return num_tokens

    def _link(self, node: Node, num_tokens: int) -> int:
        newest, nodes = self._newest, self._nodes
        earlier, later = node.earlier, node.later
        first = len(earlier)
        last = min(node.length, first + num_tokens)
        place = (node.number << _POSITION_BITS) + first
        anchor = 0
        for token in node.before(first, ANCHOR):
            anchor = anchor << _TOKEN_BITS ^ token
        for token in node.tokens[first:last]:
            anchor &= _ANCHOR_MASK
            before = newest.get(anchor, _NOWHERE)
            earlier.append(before)
            later.append(_NOWHERE)
            if before >= 0:
                nodes[before >> _POSITION_BITS].later[before & _POSITION_MASK] = place
            newest[anchor] = place
            place += 1
            anchor = anchor << _TOKEN_BITS ^ token
        if last >= node.length:
            self._to_link.popleft()
        return num_tokens - max(0, last - first)

    def _unlink(self, node: Node, length: int, num_tokens: int) -> int:
        """Takes the places of a run behind its first `length` tokens out of their chains, the last ones first."""
        newest, nodes, tokens = self._newest, self._nodes, node.tokens
        keep = max(length, len(tokens) - num_tokens)
        num_done = len(tokens) - keep
        while len(node.earlier) > keep:
            before, after = node.earlier.pop(), node.later.pop()
            if after >= 0:
                nodes[after >> _POSITION_BITS].earlier[after & _POSITION_MASK] = before
            else:
                anchor = 0
                for token in node.before(len(node.earlier), ANCHOR):
                    anchor = anchor << _TOKEN_BITS ^ token
                if before >= 0:
                    newest[anchor & _ANCHOR_MASK] = before
                else:
                    del newest[anchor & _ANCHOR_MASK]
            if before >= 0:
                nodes[before >> _POSITION_BITS].later[before & _POSITION_MASK] = after
        del tokens[keep:]
        self._num_tokens -= num_done
        if keep == length:
            self._to_unlink.popleft()
            if keep == 0:
                del self._nodes[node.number]
        return num_tokens - num_done

    # ---- search ----

    def find(self, token_ids: Sequence[int]) -> Match:
        """Finds the places behind the longest suffix of these tokens, of ANCHOR to MAX_SUFFIX tokens."""
        if len(token_ids) < ANCHOR:
            return NO_MATCH
        anchor = 0
        for token in token_ids[-ANCHOR:]:
            anchor = anchor << _TOKEN_BITS ^ token
        place = self._newest.get(anchor & _ANCHOR_MASK, _NOWHERE)
        if place < 0:
            return NO_MATCH
        suffix = array("i", token_ids[-MAX_SUFFIX:])
        found: list[Place] = []
        best = ANCHOR  # tokens; `wanted` is what a place must have before it to be as good
        wanted = suffix[-best:]
        for _ in range(MAX_HOPS):
            node, position = self._nodes[place >> _POSITION_BITS], place & _POSITION_MASK
            before = node.tokens[position - best : position] if position >= best else node.before(position, best)
            if before == wanted and position < node.length:
                if best < len(suffix) and node.token_before(position - best) == suffix[-best - 1]:
                    best, found = _match_length(node, position, suffix, best), []
                    wanted = suffix[-best:]
                if len(found) < MAX_PLACES:
                    found.append((node, position))
            place = node.earlier[position]
            if place < 0:
                break
        return Match(found, best) if found else NO_MATCH

    # ---- checks ----

    def text(self, name: str) -> list[int]:
        """Returns a text as it was added."""
        node = self._ends[name]
        length = node.texts[name]
        return node.before(length, 1 << 62).tolist()

    def check(self) -> None:
        """Raises AssertionError unless the tree, its chains and its counts agree. Slow: for tests."""
        nodes, cut = self._nodes, {node for node, _ in self._to_unlink}
        assert sum(len(node.tokens) for node in nodes.values()) == self._num_tokens, "miscounted tokens"
        for node in nodes.values():
            assert node.length <= len(node.tokens) and len(node.earlier) == len(node.later) <= len(node.tokens)
            assert node.length == max(node.way_out, default=0), "a run has tokens that no text has"
            assert node.length == len(node.tokens) or node in cut, "cut tokens will not be freed"
            ways = Counter(node.texts.values())
            for at, children in node.children.items():
                ways[at] += sum(sum(child.way_out.values()) for child in children.values())
            assert ways == node.way_out, "miscounted texts"
            if len(node.earlier) < node.length:
                assert node in self._to_link, "a run will not be linked"
        linked = {
            number << _POSITION_BITS | position for number, node in nodes.items() for position in range(len(node.later))
        }
        seen = set()
        for newest in self._newest.values():
            place, after = newest, _NOWHERE
            while place >= 0:
                node, position = nodes[place >> _POSITION_BITS], place & _POSITION_MASK
                assert node.later[position] == after, "a chain is broken"
                seen.add(place)
                place, after = node.earlier[position], place
        assert seen == linked, "places are in no chain"


def follow(places: Sequence[Place], token: int) -> list[Place]:
    """Returns the places behind those of `places` that have this token.

    Of the longest match of a text, these are the longest match of the text with this token: a longer one would have
    been longer before.
    """
    found: list[Place] = []
    for node, position in places:
        if position < node.length and node.tokens[position] == token:
            position += 1
            if position < node.length:
                found.append((node, position))
            if position in node.children:
                found += [(child, 0) for child in node.children[position].values()]
    return found


def _common_length(node: Node, tokens: array[int], first: int) -> int:
    """Returns how many tokens of a run are equal to those from `first` on."""
    equal, differ = 0, min(node.length, len(tokens) - first) + 1  # so many tokens are equal, and so many are not
    step = differ - 1  # at first all that there are
    while step:
        end = equal + step
        if node.tokens[equal:end] == tokens[first + equal : first + end]:
            equal = end
        else:
            differ = end
        step = (differ - equal) // 2
    return equal


def _match_length(node: Node, position: int, suffix: array[int], least: int) -> int:
    """Returns how many tokens before a place are the last ones of `suffix`. The last `least` ones are."""
    before = node.before(position, len(suffix))
    most = min(len(before), len(suffix))
    if before[-most:] == suffix[-most:]:
        return most
    for mine, other in zip(before[-least - 1 :: -1], suffix[-least - 1 :: -1]):
        if mine != other:
            break
        least += 1
    return least
