"""Memory under random use: encoder inputs, forks, leases, swaps, steps that fail, in random order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.core.kv import CrossAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from tests.property.memory_load import MemoryLoad

OPERATIONS = (
    ["arrive"] * 5 + ["run"] * 7 + ["preempt"] * 6 + ["swap_in"] * 5 + ["step"] * 8 + ["fork"] * 3 + ["go_on"] * 3
    + ["load_prefix"] * 4 + ["admit_again", "admit_again", "end", "end", "lease", "evict_lease", "wait", "failing_step"]
    + ["lose_outside", "forget_inside", "forget_inside"]
)  # fmt: skip


@st.composite
def kv_configs(draw: st.DrawFn) -> KVCacheConfig:
    block_size = draw(st.integers(1, 4))
    other_size = draw(st.sampled_from([block_size, block_size, 2 * block_size, 3]))
    full = FullAttentionSpec(block_size, 1, 8, "float16")
    window = SlidingWindowSpec(other_size, 2, 8, "float16", window=draw(st.integers(1, 6)))
    specs = draw(st.sampled_from([[full], [full], [window], [full, window]]))
    groups = tuple(KVCacheGroup(spec, (layer,)) for layer, spec in enumerate(specs))
    cross = KVCacheGroup(CrossAttentionSpec(block_size, 3, 8, "float16"), (0,))
    num_blocks = draw(st.integers(10, 25)) * len(specs) * 4 // (block_size + 1)
    return KVCacheConfig(num_blocks, block_size, groups, cross, draw(st.sampled_from([0, 6, 12, 20, 60])))


operations = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 60), st.integers(0, 60), st.integers(1, 12)),
    min_size=40,
    max_size=100,
)


@settings(max_examples=2 * settings.default.max_examples)
@given(kv_configs(), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]), st.booleans(), operations)
def test_every_sequence_always_finds_what_is_its_own(
    config: KVCacheConfig,
    caching: bool,
    lease_fraction: float,
    connected: bool,
    happening: list[tuple[str, int, int, int]],
) -> None:
    load = MemoryLoad(config, caching, lease_fraction, connected)
    for name, which, other, most in happening:
        getattr(load, name)(which, other, most)
        load.check()
    load.step(0, 0, 0)
    load.reset(0, 0, 0)
    load.check()
