"""Groups with pages of any size share the memory behind the block ids, and no layer ever reads another's."""

from __future__ import annotations

from typing import ClassVar

import torch
from hypothesis import given
from hypothesis import strategies as st

from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.core.kv import (
    DTYPE_BYTES,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    PageTensor,
    lay_out_pages,
)
from ratoon.core.plan import BlockCopy, BlockTransfer, SchedulerOutput
from ratoon.execution.kv.kv_tensors import KVTensors

NUM_BLOCKS, NUM_HOST_BLOCKS = 9, 4
DTYPES = sorted(DTYPE_BYTES)


class TwoTensorsSpec(KVCacheSpec, frozen=True):
    """As a layer has that keeps two things of different types."""

    content: ClassVar[str] = "two things"
    growth: ClassVar[str] = "full"

    width: int
    dtypes: tuple[str, str]

    @property
    def tensors(self) -> tuple[PageTensor, ...]:
        return (PageTensor((self.width,), self.dtypes[0]), PageTensor((self.block_size, 3), self.dtypes[1]))


@st.composite
def many_groups(draw: st.DrawFn) -> tuple[KVCacheGroup, ...]:
    block_size = draw(st.integers(1, 5))
    attention = st.builds(
        FullAttentionSpec, st.just(block_size), st.integers(1, 3), st.integers(1, 9), st.sampled_from(DTYPES)
    )
    dtypes = st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES))
    two = st.builds(TwoTensorsSpec, st.just(block_size), st.integers(1, 40), dtypes)
    specs = draw(st.lists(attention | two, min_size=1, max_size=4))
    groups, first = [], 0
    for spec in specs:
        count = draw(st.integers(1, 6))
        groups.append(KVCacheGroup(spec, tuple(range(first, first + count))))
        first += count
    return tuple(groups)


@given(many_groups())
def test_places_hold_what_is_put_there_and_cost_no_more_than_they_must(groups: tuple[KVCacheGroup, ...]) -> None:
    layout = lay_out_pages(groups)
    for group, places in zip(groups, layout.places, strict=True):
        size = group.spec.page_size_bytes
        assert len(places) == len(group.layers)
        taken = [(tensor, byte) for tensor, start in places for byte in range(start, start + size)]
        assert len(set(taken)) == len(taken), "two layers of one group overlap"
        assert all(byte < layout.tensor_bytes[tensor] for tensor, byte in taken)
    largest = max(group.spec.page_size_bytes for group in groups)
    of_groups = [group.spec.page_size_bytes * len(group.layers) for group in groups]
    assert max(of_groups) <= sum(layout.tensor_bytes) <= sum(of_groups)
    if len({group.spec.page_size_bytes for group in groups}) == 1:  # the j-th layers of all groups share a tensor
        assert layout.tensor_bytes == (largest,) * max(len(group.layers) for group in groups)
        assert all(place == (index, 0) for places in layout.places for index, place in enumerate(places))


@given(many_groups(), st.lists(st.integers(0, 3), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS))
def test_blocks_keep_what_their_group_wrote_and_take_it_along(
    groups: tuple[KVCacheGroup, ...], owners: list[int]
) -> None:
    config = KVCacheConfig(NUM_BLOCKS, groups[0].spec.block_size, groups, None, NUM_HOST_BLOCKS)
    kv = KVTensors(config, [TorchReferenceBackend()] * len(groups), torch.device("cpu"))
    group_of = [owner % len(groups) for owner in owners]  # of each block id

    def write(block: int) -> None:
        for layer in groups[group_of[block]].layers:
            for number, tensor in enumerate(kv.of_layer[layer]):
                tensor[block] = content(block, layer, number)

    def content(block: int, layer: int, number: int) -> int:
        return 1 + (block * 31 + layer * 7 + number * 3) % 120  # exact in every type

    def holds(block: int, written: int) -> bool:
        return all(
            bool((tensor[block] == content(written, layer, number)).all())
            for layer in groups[group_of[written]].layers
            for number, tensor in enumerate(kv.of_layer[layer])
        )

    for block in range(1, NUM_BLOCKS):
        write(block)
    assert all(holds(block, block) for block in range(1, NUM_BLOCKS))
    # 1 goes to the host and is overwritten by a copy of 2, which 3 replaces; then 1 comes back where 4 was
    copies = [BlockCopy("a", 0, 0, 2, 1), BlockCopy("a", 0, 0, 3, 2)]
    kv.move_blocks(SchedulerOutput(stores=[BlockTransfer(1, 2)], block_copies=copies))
    assert holds(1, 2) and holds(2, 3) and holds(3, 3)
    kv.move_blocks(SchedulerOutput(loads=[BlockTransfer(4, 2)]))
    assert holds(4, 1)
    assert all(holds(block, block) for block in range(5, NUM_BLOCKS)), "others are as they were"
    kv.release()
    kv.allocate()
    assert all(not bool(tensor.any()) for cache in kv.of_layer.values() for tensor in cache)
