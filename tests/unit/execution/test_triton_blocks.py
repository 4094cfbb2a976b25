"""Blocks that a kernel copies in all tensors at once, and the order of a plan's copies. Without a GPU the kernel runs
under Triton's interpreter."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

pytest.importorskip("triton")

from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec, group_layers
from ratoon.core.kv_connector import BlockMover
from ratoon.core.plan import BlockCopy, SchedulerOutput
from ratoon.core.plan import BlockTransfer as Move
from ratoon.core.plan import ConnectorTransfer as Slot
from ratoon.execution.kv.block_kernels import Pages, copy_blocks
from ratoon.execution.kv.block_swaps import BlockSwaps, CopyStream, CudaCopyStream, runs_of, split_rows
from ratoon.execution.kv.kv_tensors import KVTensors, staging_size

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or Triton's interpreter"
)


@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("widths", [[8], [1500, 3, 1024]])
def test_blocks_of_all_tensors_are_copied_and_no_others(widths: list[int], at_once: int) -> None:
    source = [torch.randint(1, 1000, (6, width), device=DEVICE) for width in widths]
    target = [torch.zeros(9, width, dtype=torch.int64, device=DEVICE) for width in widths]
    copies = [(2, 8), (5, 1), (2, 3)]
    for first in range(0, len(copies), at_once):
        copy_blocks(Pages(source, DEVICE), Pages(target, DEVICE), copies[first : first + at_once])
    copy_blocks(Pages(source, DEVICE), Pages(target, DEVICE), [])
    for before, after in zip(source, target):
        assert after[8].equal(before[2]) and after[1].equal(before[5]) and after[3].equal(before[2])
        assert not after[[0, 2, 4, 5, 6, 7]].any()


class EagerStream:
    """Copies run as soon as they are submitted: a stream beside an idle device."""

    def mark(self) -> None:
        pass

    def submit(self, copy: Callable[[], None], after: object = None) -> object:
        copy()
        return None

    def wait(self, end: object) -> None:
        pass

    def drain(self) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()


class LazyStream(EagerStream):
    """Copies run when they are waited for, the latest that is allowed."""

    def __init__(self) -> None:
        self._copies: list[Callable[[], None]] = []
        self._num_done = 0
        self._lock = threading.Lock()  # threads of a connector drain it too

    def submit(self, copy: Callable[[], None], after: object = None) -> int:
        self._copies.append(copy)
        return len(self._copies)

    def wait(self, end: object) -> None:
        assert isinstance(end, int)
        with self._lock:
            for copy in self._copies[self._num_done : end]:
                copy()
            self._num_done = max(self._num_done, end)

    def drain(self) -> None:
        self.wait(len(self._copies))
        super().drain()


def make_kv(stream: CopyStream | None = None, num_host_blocks: int = 5) -> KVTensors:
    """With the kernel and this stream for swaps, or without both."""
    specs = [FullAttentionSpec(4, 2, 8, "float32"), SlidingWindowSpec(4, 1, 8, "float32", 6)]
    groups = group_layers(specs)
    config = KVCacheConfig(num_blocks=12, block_size=4, groups=groups, num_host_blocks=num_host_blocks)
    kv = KVTensors(config, [TorchReferenceBackend()] * len(groups), DEVICE)
    widths = [tensor.shape[1] for tensor in kv._tensors]
    host = torch.zeros(num_host_blocks + 1, sum(widths), dtype=torch.int64, pin_memory=DEVICE.type == "cuda")
    kv._host_tensors = split_rows(host, widths)
    kv._pages = kv._swaps = None
    if stream is not None:
        kv._pages = Pages(kv._tensors, DEVICE)
        staging = torch.zeros(4, sum(widths), dtype=torch.int64, device=DEVICE)
        kv._swaps = BlockSwaps(kv._pages, host, staging, 2, stream)
    return kv


def streams() -> list[CopyStream]:
    return [EagerStream(), LazyStream()] + ([CudaCopyStream(DEVICE)] if DEVICE.type == "cuda" else [])


def content_after(kv: KVTensors, plans: Sequence[SchedulerOutput], written: Sequence[int] = ()) -> list[torch.Tensor]:
    """Of all blocks, on the device and on the host. After every plan, its step writes to these blocks."""
    for number, tensor in enumerate(kv._tensors + kv._host_tensors):
        generator = torch.Generator().manual_seed(number)
        tensor.copy_(torch.randint(0, 2**40, tensor.shape, generator=generator))
    for number, plan in enumerate(plans):
        kv.move_blocks(plan)
        for tensor in kv._tensors:
            tensor[list(written)] = number
    if kv._swaps is not None:
        kv._swaps.drain()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return [tensor.cpu() for tensor in kv._tensors + kv._host_tensors]


@pytest.mark.parametrize(
    "plan",
    [
        SchedulerOutput(block_copies=[BlockCopy("a", 0, 0, 3, 7), BlockCopy("b", 0, 0, 3, 8)]),
        # Block 4 is stored, then a target; 5 is a source, then loaded.
        SchedulerOutput(
            block_copies=[BlockCopy("a", 0, 0, 5, 4)],
            stores=[Move(4, 2), Move(6, 1)],
            loads=[Move(5, 3)],
        ),
        # 2 is a source and a target: not by the kernel
        SchedulerOutput(block_copies=[BlockCopy("a", 0, 0, 2, 9), BlockCopy("b", 0, 0, 6, 2)], stores=[Move(9, 4)]),
        SchedulerOutput(stores=[Move(4, 2)], loads=[Move(4, 3), Move(5, 2)]),
    ],
)
def test_a_plan_moves_blocks_as_without_the_kernel(plan: SchedulerOutput) -> None:
    expected = content_after(make_kv(), [plan])
    for stream in streams():
        found = content_after(make_kv(stream), [plan])
        assert all(ours.equal(theirs) for ours, theirs in zip(found, expected)), stream


class KeptBlocks(BlockMover):
    """The worker's half of a connector, in a dictionary."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}

    def save(self, key: bytes, parts: Sequence[memoryview]) -> None:
        assert all(part.readonly for part in parts)
        self.blocks[key] = b"".join(parts)

    def load(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        data = self.blocks.get(key, b"")
        for part in parts:
            part[:] = data[: part.nbytes].ljust(part.nbytes, b"?")
            data = data[part.nbytes :]
        return key in self.blocks


def test_a_connector_reads_slots_behind_their_stores_and_writes_them_before_their_loads() -> None:
    plans = [
        SchedulerOutput(stores=[Move(4, 2), Move(6, 1)], saves=[Slot(2, b"four"), Slot(1, b"six")]),
        # Slot 2 is read by a load while the steps run ahead, then gets other content.
        SchedulerOutput(stores=[Move(5, 3)], loads=[Move(8, 2)]),
        SchedulerOutput(fetches=[Slot(2, b"six"), Slot(4, b"four")], loads=[Move(9, 2), Move(10, 4)]),
        SchedulerOutput(stores=[Move(9, 5)], saves=[Slot(5, b"again")]),
    ]
    results = []
    for stream in [None, *streams()]:
        kv, mover = make_kv(stream), KeptBlocks()
        kv.connect(mover, has_ranks=True)  # so that a step waits for its fetches
        found = content_after(kv, plans, written=[4, 6, 8])
        kv.close()
        results.append((found, mover.blocks))
    expected, kept = results[0]
    assert len(kept) == 3 and kept[b"again"] == kept[b"six"] != kept[b"four"]
    for found, blocks in results[1:]:
        assert all(ours.equal(theirs) for ours, theirs in zip(found, expected, strict=True))
        assert blocks == kept


def test_a_block_that_a_connector_has_not_is_reported_and_others_arrive() -> None:
    for stream in [None, *streams()]:
        kv, mover = make_kv(stream), KeptBlocks()
        kv.connect(mover, has_ranks=True)
        content_after(kv, [SchedulerOutput(stores=[Move(4, 2)], saves=[Slot(2, b"four")])])
        fetches = [Slot(3, b"four"), Slot(1, b"five")]
        report = kv.move_blocks(SchedulerOutput(fetches=fetches, loads=[Move(8, 3), Move(9, 1)]))
        assert report is not None and (report.failed_stores, report.failed_loads, report.loaded) == ([1], [9], [8])


def test_swaps_of_many_steps_read_what_the_plan_means_whenever_the_copies_run() -> None:
    """More blocks than the staging buffer has; blocks that a step overwrites at once; host blocks that are read, and
    written again, while earlier copies may not have run."""
    plans = [
        SchedulerOutput(stores=[Move(1, 8)]),
        SchedulerOutput(),
        SchedulerOutput(loads=[Move(9, 3), Move(10, 7)], stores=[Move(8, 8)]),
        SchedulerOutput(
            stores=[Move(9, 3), Move(1, 7), Move(10, 1)],
            block_copies=[BlockCopy("a", 0, 0, 10, 11)],
        ),
        SchedulerOutput(loads=[]),
        SchedulerOutput(
            loads=[
                Move(4, 8),
                Move(5, 3),
                Move(6, 1),
                Move(9, 7),
                Move(8, 2),
            ],
            stores=[Move(11, 4), Move(10, 5)],
        ),
        SchedulerOutput(loads=[Move(1, 4), Move(2, 5)]),
    ]
    expected = content_after(make_kv(num_host_blocks=9), plans, written=[1, 2, 3])
    for stream in streams():
        found = content_after(make_kv(stream, num_host_blocks=9), plans, written=[1, 2, 3])
        assert all(ours.equal(theirs) for ours, theirs in zip(found, expected)), stream


def test_a_step_that_swaps_out_waits_for_no_copy_while_the_staging_buffer_has_room() -> None:
    stream = LazyStream()
    kv = make_kv(stream)
    kv.move_blocks(SchedulerOutput(stores=[Move(1, 1), Move(2, 2), Move(3, 3), Move(4, 4)]))
    assert stream._num_done == 0 and len(stream._copies) == 2
    kv.move_blocks(SchedulerOutput(stores=[Move(5, 5)]))
    assert stream._num_done == 1, "the first part of the buffer is used again"


def test_copies_have_ended_before_their_memory_is_freed() -> None:
    stream = LazyStream()
    kv = make_kv(stream)
    kv.move_blocks(SchedulerOutput(stores=[Move(1, 1), Move(2, 2)]))
    assert stream._num_done == 0
    del kv
    assert stream._num_done == 1


def test_neighbours_are_copied_together() -> None:
    assert runs_of([4, 5, 6, 9, 10], [1, 2, 3, 4, 5]) == [(4, 1, 3), (9, 4, 2)]
    assert runs_of([4, 5], [7, 6]) == [(4, 7, 1), (5, 6, 1)]
    assert runs_of([], []) == []


@pytest.mark.parametrize(
    ("block_bytes", "num_host_blocks", "expected"),
    [(2**21, 5000, (128, 32)), (2**21, 70, (64, 32)), (2**21, 3, (6, 3)), (2**26, 100, (4, 1)), (2**30, 10, (2, 1))],
)
def test_the_staging_buffer_is_bounded(block_bytes: int, num_host_blocks: int, expected: tuple[int, int]) -> None:
    assert staging_size(block_bytes, num_host_blocks) == expected
