"""Blocks that a kernel copies in all tensors at once, and the order of a plan's copies. Without a GPU the kernel runs
under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec, group_layers
from ratoon.core.plan import BlockCopy, SchedulerOutput
from ratoon.execution.block_kernels import Pages, copy_blocks
from ratoon.execution.kv_tensors import KVTensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or Triton's interpreter"
)


@pytest.mark.parametrize("widths", [[8], [1500, 3, 1024]])
def test_blocks_of_all_tensors_are_copied_and_no_others(widths: list[int]) -> None:
    source = [torch.randint(1, 1000, (6, width), device=DEVICE) for width in widths]
    target = [torch.zeros(9, width, dtype=torch.int64, device=DEVICE) for width in widths]
    copy_blocks(Pages(source, DEVICE), Pages(target, DEVICE), [(2, 8), (5, 1), (2, 3)])
    copy_blocks(Pages(source, DEVICE), Pages(target, DEVICE), [])
    for before, after in zip(source, target):
        assert after[8].equal(before[2]) and after[1].equal(before[5]) and after[3].equal(before[2])
        assert not after[[0, 2, 4, 5, 6, 7]].any()


def make_kv(with_kernel: bool) -> KVTensors:
    specs = [FullAttentionSpec(4, 2, 8, "float32"), SlidingWindowSpec(4, 1, 8, "float32", 6)]
    groups = group_layers(specs)
    config = KVCacheConfig(num_blocks=12, block_size=4, groups=groups, num_host_blocks=5)
    kv = KVTensors(config, [TorchReferenceBackend()] * len(groups), DEVICE)
    if with_kernel and kv._pages is None:
        kv._pages = Pages(kv._tensors, DEVICE), Pages(kv._host_tensors, DEVICE)
    elif not with_kernel:
        kv._pages = None
    return kv


@pytest.mark.parametrize(
    "plan",
    [
        SchedulerOutput(block_copies=[BlockCopy("a", 0, 0, 3, 7), BlockCopy("b", 0, 0, 3, 8)]),
        # Block 4 is swapped out, then a target; 5 is a source, then swapped in.
        SchedulerOutput(block_copies=[BlockCopy("a", 0, 0, 5, 4)], swapped_out=[(4, 2), (6, 1)], swapped_in=[(3, 5)]),
        # 2 is a source and a target: not by the kernel
        SchedulerOutput(block_copies=[BlockCopy("a", 0, 0, 2, 9), BlockCopy("b", 0, 0, 6, 2)], swapped_out=[(9, 4)]),
        SchedulerOutput(swapped_out=[(4, 2)], swapped_in=[(3, 4), (2, 5)]),
    ],
)
def test_a_plan_moves_blocks_as_without_the_kernel(plan: SchedulerOutput) -> None:
    contents = []
    for with_kernel in (False, True):
        kv = make_kv(with_kernel)
        for number, tensor in enumerate(kv._tensors + kv._host_tensors):
            generator = torch.Generator().manual_seed(number)
            tensor.copy_(torch.randint(0, 2**40, tensor.shape, generator=generator))
        kv.move_blocks(plan)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        contents.append([tensor.cpu() for tensor in kv._tensors + kv._host_tensors])
    assert all(ours.equal(theirs) for ours, theirs in zip(*contents))
