"""Drafts from a request's own text: the longest match wins, and a token costs the same however long the text is."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from ratoon.scheduling.branch import Branch
from ratoon.scheduling.drafters.ngrams import NgramIndex
from ratoon.scheduling.drafters.own_text import TOKENS_AT_ONCE, NgramDrafter
from tests.unit.scheduling.steps import add, scheduler_of


def branch_with(tokens: list[int]) -> Branch:
    scheduler = scheduler_of(max_model_len=100_000, num_blocks=50_000)
    add(scheduler, "a", tokens)
    return scheduler.state.branches["a"]


def drafts_of(tokens: list[int], max_tokens: int = 4, least: int = 2, most: int = 8) -> list[int]:
    return list(NgramDrafter(least, most).propose(branch_with(tokens), max_tokens))


def test_what_followed_the_last_time_is_drafted() -> None:
    assert drafts_of([1, 2, 3, 4, 5, 6, 9, 1, 2]) == [3, 4, 5, 6]


def test_a_text_that_repeats_nothing_has_no_draft() -> None:
    assert drafts_of([1, 2, 3, 4, 5, 6]) == []
    assert drafts_of([1, 2, 3, 4, 5, 2]) == []  # one token alone is not enough
    assert drafts_of([1]) == []


def test_the_longest_match_wins_and_of_equal_ones_the_last() -> None:
    assert drafts_of([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1) == [3]
    assert drafts_of([5, 1, 2, 3, 6, 1, 2, 4, 7, 1, 2], 1) == [4]


def test_a_text_that_repeats_itself_goes_on_as_it_did() -> None:
    assert drafts_of([9, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_a_draft_follows_the_text_as_it_grows() -> None:
    branch, drafter = branch_with([1, 2, 3, 4, 5]), NgramDrafter(2, 8)
    assert drafter.propose(branch, 2) == ()
    branch.append_tokens([1, 2])
    assert drafter.propose(branch, 2) == [3, 4]
    branch.append_tokens([9])
    assert drafter.propose(branch, 2) == ()
    branch.append_tokens([1, 2])
    assert drafter.propose(branch, 2) == [9, 1]


def test_a_long_prompt_is_indexed_in_parts() -> None:
    tokens = random.Random(0).sample(range(100_000), 3 * TOKENS_AT_ONCE)
    tokens += tokens[-10:-5]
    branch, drafter = branch_with(tokens), NgramDrafter(3, 8)
    assert [drafter.propose(branch, 1) for _ in range(3)] == [(), (), [tokens[-10]]]


def test_nothing_is_kept_of_a_branch_that_ended() -> None:
    branch, drafter = branch_with([1, 2, 3, 1, 2]), NgramDrafter(2, 8)
    drafter.propose(branch, 1)
    drafter.drop(branch)
    drafter.drop(branch)
    assert not drafter._places


@given(st.lists(st.integers(0, 3), max_size=300), st.integers(1, 4))
def test_the_index_finds_what_a_search_would(tokens: list[int], least: int) -> None:
    """But for candidates beyond those that are compared: it finds some match wherever there is one."""
    most = 6
    growing: list[int] = []
    index = NgramIndex(growing, least, most)
    for token in tokens:
        growing.append(token)
        index.extend(TOKENS_AT_ONCE)
        found, num_equal = index.find(growing)
        ends = [end for end in range(least, len(growing)) if growing[end - least : end] == growing[-least:]]
        lengths = {end: common_end(growing[:end], growing, most) for end in ends}
        assert (found >= 0) == bool(ends)
        if len(ends) <= 16 and ends:
            assert lengths[found] == num_equal == max(lengths.values())
            assert found == max(end for end in ends if lengths[end] == lengths[found])


def common_end(one: list[int], other: list[int], most: int) -> int:
    length = 0
    while length < min(most, len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return length


def test_a_match_is_as_long_as_it_was_followed() -> None:
    text = list(range(10, 50))
    branch, drafter = branch_with([*text, 5, *text[:3]]), NgramDrafter(3, 8)
    found = []
    for token in text[3:30]:
        assert drafter.propose(branch, 1) == [token]
        found.append(drafter.num_matched(branch))
        branch.append_tokens([token])
    assert found == list(range(3, 30)), "also beyond the tokens that are compared"
    branch.append_tokens([7, 20, 21, 22])
    assert drafter.propose(branch, 2) == [23, 24] and drafter.num_matched(branch) == 3
