"""The suffix index against a search that compares everything with everything."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ratoon.scheduling.drafters import suffix_index
from ratoon.scheduling.drafters.suffix_index import ANCHOR, MAX_HOPS, MAX_PLACES, MAX_SUFFIX, SuffixIndex, follow

ALL = 1 << 40  # tokens to work on: whatever there is
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)  # few tokens: much repeats


def longest_suffix(texts: Sequence[Sequence[int]], tokens: Sequence[int]) -> tuple[int, set[tuple[int, ...]]]:
    """The length of the longest suffix that a text has with a token behind it, and what those texts have behind it."""
    for length in range(min(len(tokens), MAX_SUFFIX), ANCHOR - 1, -1):
        suffix = list(tokens[-length:])
        behind = {
            tuple(text[at + length :])
            for text in texts
            for at in range(len(text) - length)
            if list(text[at : at + length]) == suffix
        }
        if behind:
            return length, behind
    return 0, set()


def heads(index: SuffixIndex, query: Sequence[int]) -> tuple[int, set[int]]:
    match = index.find(query)
    return match.length, {node.tokens[position] for node, position in match.places}


class Index(RuleBasedStateMachine):
    """Texts come and go, as wholes, as continuations of others and as their beginnings, while a query grows."""

    def __init__(self) -> None:
        super().__init__()
        self.index = SuffixIndex()
        self.texts: dict[str, list[int]] = {}

    @rule(name=st.integers(0, 9), text=tokens)
    def add(self, name: int, text: list[int]) -> None:
        self._add(str(name), text)

    @precondition(lambda self: self.texts)
    @rule(name=st.integers(0, 9), data=st.data(), suffix=st.lists(st.integers(0, 2), max_size=8))
    def add_one_that_begins_like_another(self, name: int, data: st.DataObject, suffix: list[int]) -> None:
        parent = self.texts[data.draw(st.sampled_from(sorted(self.texts)))]
        at = data.draw(st.integers(1, len(parent)))
        self._add(str(name), parent[:at] + suffix)

    def _add(self, name: str, text: list[int]) -> None:
        self.index.add(name, text)
        self.texts[name] = text

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)))
        self.index.remove(name)
        del self.texts[name]

    @rule(num_tokens=st.integers(1, 7))
    def work(self, num_tokens: int) -> None:
        had_work = self.index.has_work
        left = self.index.work(num_tokens)
        assert 0 <= left <= num_tokens and (left == 0 or not self.index.has_work)
        assert had_work or left == num_tokens

    @rule(query=tokens)
    def find_nothing_that_no_text_has(self, query: list[int]) -> None:
        match = self.index.find(query)
        length, _ = longest_suffix(list(self.texts.values()), query)
        assert match.length <= length
        for node, position in match.places:
            context = node.before(position, match.length).tolist()
            assert context == query[-match.length :]
            found = [*context, node.tokens[position]]
            width = len(found)
            assert any(
                text[at : at + width] == found for text in self.texts.values() for at in range(len(text) - width + 1)
            )

    @rule(query=tokens)
    def find_the_longest_once_all_is_linked(self, query: list[int]) -> None:
        self.index.work(ALL)
        assert not self.index.has_work
        texts = list(self.texts.values())
        num_places = sum(text[at - ANCHOR : at] == query[-ANCHOR:] for text in texts for at in range(ANCHOR, len(text)))
        if len(query) < ANCHOR or num_places > MAX_HOPS:
            return
        length, behind = longest_suffix(texts, query)
        found_length, found = heads(self.index, query)
        assert found_length == length
        expected = {rest[0] for rest in behind}
        assert found <= expected and (found == expected or len(self.index.find(query).places) == MAX_PLACES)

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.texts)
        for name, text in self.texts.items():
            assert self.index.text(name) == text

    def teardown(self) -> None:
        for name in self.texts:
            self.index.remove(name)
        self.index.work(ALL)
        self.index.check()
        assert self.index.num_bytes == SuffixIndex().num_bytes, "something is left of texts that were all taken out"


TestIndex = Index.TestCase


@mock.patch.object(suffix_index, "MAX_HOPS", ALL)
@mock.patch.object(suffix_index, "MAX_PLACES", ALL)
@given(st.lists(tokens, min_size=1, max_size=5), st.data())
def test_following_a_match_finds_what_a_new_search_finds(texts: list[list[int]], data: st.DataObject) -> None:
    for suffix in data.draw(st.lists(tokens, max_size=3)):  # branches of the first text
        texts.append(texts[0][: data.draw(st.integers(1, len(texts[0])))] + suffix)
    query = data.draw(st.sampled_from(texts)) + data.draw(tokens)
    index = SuffixIndex()
    for number, text in enumerate(texts):
        index.add(str(number), text)
    index.work(ALL)
    match = index.find(query[:ANCHOR])
    places, length = match.places, match.length
    for end, token in enumerate(query[ANCHOR:], ANCHOR + 1):
        places, length = follow(places, token), length + 1
        searched = index.find(query[:end])
        if places:
            assert length == searched.length
            assert {(node.number, at) for node, at in places} == {(node.number, at) for node, at in searched.places}
        else:
            places, length = searched
