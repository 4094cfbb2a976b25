from __future__ import annotations

from ratoon.core.adapters import Adapter
from ratoon.core.params import SamplingParams
from ratoon.scheduling.admission import longest_total
from ratoon.scheduling.branch import branch_seed, extra_keys_of
from ratoon.scheduling.kinds.generation import stop_tokens_of
from tests.unit.scheduling.steps import request_of


def test_a_seed_depends_on_the_request_seed_and_the_choice_only() -> None:
    assert branch_seed(1, "a", 0) == branch_seed(1, "b", 0)
    seeds = {branch_seed(seed, "a", choice) for seed in range(50) for choice in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_without_a_request_seed_the_request_id_decides() -> None:
    assert branch_seed(None, "a", 0) == branch_seed(None, "a", 0)
    assert branch_seed(None, "a", 0) != branch_seed(None, "b", 0)


def test_seeds_are_the_same_in_every_release() -> None:
    """Repeating a request with its seed gives the same tokens."""
    assert branch_seed(0, "", 0) == 0xE220A8397B1DCDAF >> 1  # the first output of splitmix64 for state 0


def test_extreme_seeds_are_accepted() -> None:
    for seed in (-(2**63), 2**64 - 1):
        assert 0 <= branch_seed(seed, "a", 255) < 2**63


def test_eos_stops_unless_it_is_ignored() -> None:
    assert stop_tokens_of(SamplingParams(stop_token_ids=[3]), 9) == {3, 9}
    assert stop_tokens_of(SamplingParams(stop_token_ids=[3], ignore_eos=True), 9) == {3}
    assert stop_tokens_of(SamplingParams(all_stop_token_ids=[5], stop_token_ids=[3]), 9) == {5}


def test_a_sequence_is_no_longer_than_the_model_allows() -> None:
    assert longest_total(10, 5, 100) == 15
    assert longest_total(10, None, 100) == 100
    assert longest_total(98, 5, 100) == 100


def test_salt_and_adapter_are_different_keys() -> None:
    salted, adapted = request_of("a", 4), request_of("a", 4)
    salted.cache_salt = "x"
    adapted.adapter = Adapter("x", "/x", 8)
    assert len({extra_keys_of(one).encoded for one in (request_of("a", 4), salted, adapted)}) == 3
