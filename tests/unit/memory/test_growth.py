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
)
from ratoon.memory.block_pool import Block
from ratoon.memory.growth import GROWTH_RULES, GrowthRule, SlidingWindowRule, rule_for
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.sequence import TokenSequence

FULL = FullAttentionSpec(4, 1, 8, "float16")


class StateSpec(KVCacheSpec, frozen=True):
    """A state that every token changes, as state-space layers have: a block holds it as it is behind its last token."""

    content: ClassVar[str] = "a state"
    growth: ClassVar[str] = "state"

    @property
    def tensors(self) -> tuple[PageTensor, ...]:
        return PageTensor((3, 8), "float16"), PageTensor((16, 8), "float32")


class StateRule(GrowthRule):
    gives_back = True
    is_cacheable = False

    def num_unread_blocks(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 1) // self.block_size

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        return min(self.num_blocks(num_tokens), 2 + self.num_blocks(max_step_tokens))

    def holds(self, table: list[Block], num_computed_tokens: int, num_tokens: int, null: Block) -> bool:
        return num_tokens == num_computed_tokens  # an earlier state is overwritten


@pytest.fixture
def state_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GROWTH_RULES, "state", StateRule)


def manager_of(*specs: KVCacheSpec) -> KVCacheManager:
    groups = tuple(KVCacheGroup(spec, (layer,)) for layer, spec in enumerate(specs))
    return KVCacheManager(KVCacheConfig(40, 4, groups), max_model_len=1000)


def test_a_spec_names_its_rule() -> None:
    assert type(rule_for(FULL)) is GrowthRule
    assert type(rule_for(CrossAttentionSpec(4, 1, 8, "float16"))) is GrowthRule
    window = rule_for(SlidingWindowSpec(4, 1, 8, "float16", window=6))
    assert isinstance(window, SlidingWindowRule) and window.window == 6


def test_a_rule_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"StateSpec grows by the rule 'state'.*full, window, cross"):
        manager_of(StateSpec(4))


@pytest.mark.usefixtures("state_rule")
def test_a_rule_from_elsewhere_decides_which_blocks_are_held() -> None:
    manager = manager_of(StateSpec(4), FULL)
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


@pytest.mark.usefixtures("state_rule")
def test_a_group_that_can_not_be_cached_leaves_nothing_to_find() -> None:
    manager = manager_of(FULL, StateSpec(4))
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
    assert describe(StateSpec(4)) == (2, 3 * 8 * 2 + 16 * 8 * 4)
    assert describe(FullAttentionSpec(1, 1, 3, "float16")) == (1, 16), "rounded up, so that what follows is aligned"
