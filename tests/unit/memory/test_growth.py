"""Rules of growth by the names that specs give, and one that the package does not have."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from ratoon.core.kv import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    PageTensor,
    SlidingWindowSpec,
    StateSpec,
    divide_states,
    group_layers,
    lay_out_pages,
)
from ratoon.memory.block_pool import Block
from ratoon.memory.growth import GROWTH_RULES, GrowthRule, SlidingWindowRule, StateRule, rule_for
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.sequence import TokenSequence

FULL = FullAttentionSpec(4, 1, 8, "float16")
STATE = StateSpec(8, 2, 4, 16, 40, 3)


class OtherSpec(KVCacheSpec, frozen=True):
    """A state that every token changes, and that is never found again."""

    content: ClassVar[str] = "something else"
    growth: ClassVar[str] = "other"

    @property
    def tensors(self) -> tuple[PageTensor, ...]:
        return PageTensor((3, 8), "float16"), PageTensor((16, 8), "float32")


class OtherRule(GrowthRule):
    gives_back = True
    is_cacheable = False

    def num_unread_blocks(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 1) // self.block_size

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        return min(self.num_blocks(num_tokens), 2 + self.num_blocks(max_step_tokens))

    def holds(self, table: list[Block], num_computed_tokens: int, num_tokens: int, null: Block) -> bool:
        return num_tokens == num_computed_tokens  # an earlier state is overwritten


@pytest.fixture
def other_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GROWTH_RULES, "other", OtherRule)


def manager_of(*specs: KVCacheSpec) -> KVCacheManager:
    groups = tuple(KVCacheGroup(spec, (layer,)) for layer, spec in enumerate(specs))
    return KVCacheManager(KVCacheConfig(40, 4, groups), max_model_len=1000)


def test_a_spec_names_its_rule() -> None:
    assert type(rule_for(FULL)) is GrowthRule
    assert type(rule_for(CrossAttentionSpec(4, 1, 8, "float16"))) is GrowthRule
    window = rule_for(SlidingWindowSpec(4, 1, 8, "float16", window=6))
    assert isinstance(window, SlidingWindowRule) and window.window == 6
    assert type(rule_for(STATE)) is StateRule


def test_a_rule_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"OtherSpec grows by the rule 'other'.*full, window, state, cross"):
        manager_of(OtherSpec(4))


@pytest.mark.usefixtures("other_rule")
def test_a_rule_from_elsewhere_decides_which_blocks_are_held() -> None:
    manager = manager_of(OtherSpec(4), FULL)
    assert manager.gives_blocks_back
    sequence = TokenSequence("a", list(range(30)))
    for count, state_blocks, full_blocks in ((9, 3, 3), (1, 1, 3), (2, 1, 3), (1, 2, 4), (1, 1, 4), (13, 4, 7)):
        assert manager.allocate_slots(sequence, count) is not None
        sequence.num_computed_tokens += count
        held = [sum(block is not manager.pool.null_block for block in table) for table in sequence.block_tables]
        assert held == [state_blocks, full_blocks], f"behind {sequence.num_computed_tokens} tokens"
        manager.check([sequence])
    assert manager.required_blocks(30, 4) == 3 + 8
    child = TokenSequence("b", list(range(20)))
    assert manager.inherit_blocks_from_parent(sequence, child, 19) == 0, "the state behind 19 tokens is gone"
    child = TokenSequence("c", list(range(40)))
    assert manager.inherit_blocks_from_parent(sequence, child, 27) == 27
    manager.check([sequence, child])


@pytest.mark.usefixtures("other_rule")
def test_a_group_that_can_not_be_cached_leaves_nothing_to_find() -> None:
    manager = manager_of(FULL, OtherSpec(4))
    sequence = TokenSequence("a", list(range(20)))
    assert manager.allocate_slots(sequence, 20) is not None
    sequence.num_computed_tokens = 20
    assert manager.get_computed_blocks(TokenSequence("b", list(range(20))))[1] == 0
    assert sequence.block_hashes == {}
    manager.free(sequence)
    assert not manager.pool.cached_blocks(0) and not manager.pool.cached_blocks(1)


def describe(spec: Any) -> tuple[int, int]:
    return len(spec.tensors), spec.page_size_bytes


def test_pages_are_what_the_spec_says() -> None:
    assert describe(FULL) == (1, 2 * 4 * 8 * 2)
    assert describe(OtherSpec(4)) == (2, 3 * 8 * 2 + 16 * 8 * 4)
    assert describe(FullAttentionSpec(1, 1, 3, "float16")) == (1, 16), "rounded up, so that what follows is aligned"


# ---- states ----


def computed(manager: KVCacheManager, name: str, num_tokens: int, step: int = 100) -> TokenSequence:
    sequence = TokenSequence(name, list(range(num_tokens)))
    go_on(manager, sequence, num_tokens, step)
    return sequence


def go_on(manager: KVCacheManager, sequence: TokenSequence, num_tokens: int, step: int = 100) -> None:
    while num_tokens:
        count = min(num_tokens, step)
        assert manager.allocate_slots(sequence, count) is not None
        sequence.num_computed_tokens += count
        num_tokens -= count
        manager.check([sequence])


def places_of(manager: KVCacheManager, table: list[Block]) -> list[int]:
    return [place for place, block in enumerate(table) if block is not manager.pool.null_block]


def test_a_sequence_holds_the_state_that_it_reads_and_those_that_its_step_writes() -> None:
    manager = manager_of(STATE, FULL)
    sequence = TokenSequence("a", list(range(60)))
    for count, places in ((20, [0, 1, 2]), (1, [2]), (3, [2]), (1, [2, 3]), (1, [3]), (30, [3, 4, 5, 6])):
        go_on(manager, sequence, count)
        assert places_of(manager, sequence.block_tables[0]) == places, f"behind {sequence.num_computed_tokens} tokens"
    assert manager.required_blocks(60, 16) == 3 + 15


def test_a_prefix_is_found_up_to_the_last_state_that_was_kept() -> None:
    manager = manager_of(STATE, FULL)
    manager.free(computed(manager, "a", 30))
    hit, num_tokens = manager.get_computed_blocks(TokenSequence("b", list(range(40))))
    assert num_tokens == 24 and places_of(manager, hit[0]) == [2] and len(hit[1]) == 6
    manager.uncache([hit[0][2]])
    assert manager.get_computed_blocks(TokenSequence("b", list(range(40))))[1] == 16
    last = manager.get_computed_blocks(TokenSequence("b", list(range(17))))
    manager.uncache([last[0][1][2]])  # a block of keys and values in the middle
    assert manager.get_computed_blocks(TokenSequence("b", list(range(40))))[1] == 8


def test_a_fork_shares_the_state_where_its_parent_is_and_writes_to_a_copy() -> None:
    manager = manager_of(STATE, FULL)
    parent = computed(manager, "a", 21)
    child = TokenSequence("b", [*range(21), 7, 7])
    assert manager.inherit_blocks_from_parent(parent, child, 21) == 21
    shared = child.block_tables[0][2]
    assert shared is parent.block_tables[0][2] and shared.ref_cnt == 2
    assert manager.allocate_slots(child, 2) is not None
    copies = {(copy.group, copy.index): (copy.src, copy.dst) for copy in manager.take_block_copies()}
    assert copies[0, 2] == (shared.block_id, child.block_tables[0][2].block_id)
    child.num_computed_tokens += 2
    manager.check([parent, child])


def test_a_fork_at_an_earlier_token_goes_back_to_a_state_that_is_still_held() -> None:
    manager = manager_of(STATE, FULL)
    parent = computed(manager, "a", 30)  # in one step: all states of its blocks are held
    for num_tokens, found in ((30, 30), (29, 24), (24, 24), (23, 16), (8, 8), (7, 0)):
        child = TokenSequence("b", list(range(50)))
        assert manager.inherit_blocks_from_parent(parent, child, num_tokens) == found
        manager.check([parent, child])
        manager.free(child)
    go_on(manager, parent, 1)  # now the last one alone, and the others are in the prefix cache
    child = TokenSequence("b", list(range(50)))
    assert manager.inherit_blocks_from_parent(parent, child, 29) == 0
    assert manager.get_computed_blocks(child)[1] == 24


def test_what_steps_in_flight_have_overwritten_is_not_taken_up_again() -> None:
    manager = manager_of(STATE, FULL)
    parent = computed(manager, "a", 30)
    manager.roll_back(parent, 1)
    assert parent.num_computed_tokens == 29 and places_of(manager, parent.block_tables[0]) == [0, 1, 2]
    child = TokenSequence("b", list(range(50)))
    assert manager.inherit_blocks_from_parent(parent, child, 29) == 24
    manager.check([parent, child])
    manager.roll_back(parent, 5)  # to the end of a block, whose state no later token has touched
    other = TokenSequence("c", list(range(50)))
    assert manager.inherit_blocks_from_parent(parent, other, 24) == 24
    manager.check([parent, child, other])


def test_tokens_of_a_running_sequence_can_not_be_taken_back() -> None:
    manager = manager_of(STATE)
    with pytest.raises(AssertionError, match="has states"):
        manager.take_back(computed(manager, "a", 9))


def test_blocks_of_attention_are_as_long_as_fit_into_a_state() -> None:
    """And layers with states form groups whose blocks are as large as those of attention."""
    state = StateSpec(16, 48, 64, 128, 3328, 3)  # 1.6 MB, of 36 layers beside 4 that attend
    full = FullAttentionSpec(16, 4, 128, "bfloat16")  # 2 kB for a token
    specs: list[KVCacheSpec] = [full if layer % 10 == 5 else state for layer in range(40)]
    groups = group_layers(divide_states(specs, 16, None))
    assert [group.spec.block_size for group in groups] == [512] * 10
    assert [len(group.layers) for group in groups] == [4] * 10
    assert sum(lay_out_pages(groups).tensor_bytes) == 4 * state.page_size_bytes
    small = StateSpec(16, 2, 4, 16, 40, 3)  # of which several fit into a block of attention
    groups = group_layers(divide_states([small] * 9 + [full], 16, 64))
    assert [(group.spec.block_size, len(group.layers)) for group in groups] == [(64, 9), (16, 1)]
    assert sum(lay_out_pages(groups).tensor_bytes) == full.page_size_bytes
    assert divide_states([full], 16, 64) == [full]
    (alone,) = group_layers(divide_states([state] * 3, 48, None))
    assert alone.spec.block_size == 528
