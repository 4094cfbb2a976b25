"""Blocks that are swapped on CUDA: the same texts with a tiny pool, and what was measured at start-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ratoon import SamplingParams
from ratoon.core.plan import BlockTransfer
from ratoon.core.request import EngineCoreRequest
from ratoon.execution.kv.block_kernels import Pages
from ratoon.execution.kv.block_swaps import BlockSwaps, CudaCopyStream, pinned_rows
from ratoon.scheduling.planner import StepPlanner
from tests.cuda.test_graphs import core_of, runner_of, texts, texts_without_graphs
from tests.golden import tiny_models
from tests.golden.test_cuda import run_to_the_end
from tests.golden.tiny_models import random_token_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda")
SWAPPED = {"swap_bytes": 2**24, "preemption_mode": "swap"}
RECOMPUTED = {"swap_bytes": 2**24, "preemption_mode": "recompute"}
BY_COST = {"swap_bytes": 2**24}


@pytest.mark.parametrize("cache", [{}, SWAPPED, RECOMPUTED, BY_COST], ids=["no memory", "swap", "recompute", "auto"])
@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_and_swaps_change_no_text(
    depth: int, cache: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = []
    plan_step = StepPlanner.plan

    def watch(planner: StepPlanner) -> Any:
        plan = plan_step(planner)
        swapped.extend(plan.loads)
        return plan

    tiny, expected = tiny_models.tiny_llama(), texts_without_graphs()
    monkeypatch.setattr(StepPlanner, "plan", watch)
    found, core = texts(tiny, depth=depth, num_blocks=21, **cache)
    assert core.stats().num_preemptions > 0, "there was memory enough: this tests nothing"
    if cache != BY_COST:
        assert bool(swapped) == (cache == SWAPPED)
    costs = core.executor.facts.swap_costs
    assert (costs is not None) == (cache == BY_COST)
    if costs is not None:
        assert 1e-7 < costs.block < 1e-2 and 1e-9 < costs.token < 1e-1
    assert found == expected


@pytest.mark.parametrize("part_size", [3, 16])
def test_copies_beside_a_late_device_read_and_write_what_the_order_of_steps_means(part_size: int) -> None:
    torch.cuda.set_stream(torch.cuda.Stream())
    widths, num_blocks = [512, 8, 1500], 33
    tensors = [torch.randint(0, 2**40, (num_blocks, width), device=DEVICE) for width in widths]
    expected = [tensor.clone() for tensor in tensors]
    staging = torch.empty(2 * part_size, sum(widths), dtype=torch.int64, device=DEVICE)
    host = pinned_rows(num_blocks, sum(widths))
    assert host.is_pinned()
    swaps = BlockSwaps(Pages(tensors, DEVICE), host, staging, part_size, CudaCopyStream(DEVICE))
    transfers = [BlockTransfer(block, 1 + block * 7 % 32) for block in range(1, num_blocks)]
    for turn in range(4):
        torch.cuda._sleep(10_000_000)
        swaps.store(transfers)
        for tensor in tensors:
            tensor[1:] = turn
        torch.cuda._sleep(10_000_000)
        swaps.load(transfers)
        content = [tensor.clone() for tensor in tensors]
        torch.cuda.synchronize()
        for found, right in zip(content, expected):
            assert found.equal(right), turn
    torch.cuda.set_stream(torch.cuda.default_stream())


def test_host_memory_is_pinned_again_after_sleep() -> None:
    core = core_of(tiny_models.tiny_llama(), "cuda", 2, True, **SWAPPED)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    found = []
    for name in ("before", "after"):
        core.add_request(EngineCoreRequest(name, random_token_ids(12, seed=1), params))
        found.append(run_to_the_end(core)[name, 0])
        if name == "before":
            core.sleep(1)
            core.wake_up()
    assert found[0] == found[1] and runner_of(core).kv._swaps is not None
