"""How many blocks a GPU holds: the share of the engine, the largest step beside it, and what fits. With a faked GPU."""

from __future__ import annotations

import re
import time

import pytest
import torch

from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.errors import ConfigError, ModelError
from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.execution.kv.geometry import Geometry
from ratoon.execution.kv.kv_memory import (
    cut_kv_memory,
    largest_step,
    measure_prefill,
    measure_step,
    num_blocks_of,
    one_prompt,
    share_of_gpu,
    verify_longest_sequence,
)
from ratoon.execution.kv.kv_tensors import KVTensors, staging_size
from ratoon.execution.worker import refusing_what_does_not_fit
from tests.unit.execution.test_model_runner import BLOCK_SIZE, TWO_GROUPS, Driver

GIB = 2**30
CUDA = torch.device("cuda")


def with_gpu(monkeypatch: pytest.MonkeyPatch, free: int, total: int, reserved: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, total * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved * GIB)


def geometry() -> Geometry:
    driver = Driver()
    return Geometry(driver.groups, None, [], None)


def test_weights_are_part_of_the_share_and_other_programs_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, free=70, total=80, reserved=4)  # another program has 6
    assert share_of_gpu(CUDA, 0.5) == 36 * GIB


def test_a_share_that_others_have_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, free=20, total=80, reserved=4)
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        share_of_gpu(CUDA, 0.9)


def test_weights_that_fill_the_share_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, free=60, total=80, reserved=20)
    assert share_of_gpu(CUDA, 0.1) == 0


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        (CacheConfig(gpu_memory_utilization=0.5), 36 * GIB - 6 * GIB),
        (CacheConfig(memory_fraction=0.5), 35 * GIB - 6 * GIB),
        (CacheConfig(), int(0.85 * 70 * GIB) - 6 * GIB),
        (CacheConfig(num_sharers=2), int(0.85 / 2 * 70 * GIB) - 6 * GIB),
        (CacheConfig(memory_fraction=0.5, num_sharers=2), 35 * GIB - 6 * GIB),
        (CacheConfig(memory_bytes=GIB), GIB),  # a size that was asked for is a size
        (CacheConfig(num_blocks=7), None),
    ],
)
def test_the_pool_is_what_the_largest_step_leaves(
    monkeypatch: pytest.MonkeyPatch, cache: CacheConfig, expected: int | None
) -> None:
    with_gpu(monkeypatch, free=70, total=80, reserved=4)
    config = cut_kv_memory(cache, geometry(), CUDA, step_bytes=6 * GIB)
    assert config.num_blocks == (7 if expected is None else expected // config.bytes_per_block)


def test_the_buffer_for_swapped_blocks_is_taken_from_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, free=70, total=80, reserved=4)
    config = cut_kv_memory(CacheConfig(memory_fraction=0.5, swap_bytes=2 * GIB), geometry(), CUDA, step_bytes=GIB)
    assert config.num_host_blocks == 2 * GIB // config.bytes_per_block
    buffer = staging_size(config.bytes_per_block, config.num_host_blocks)[0] * config.bytes_per_block
    assert 2**27 < buffer <= 2**28 and config.num_blocks == (34 * GIB - buffer) // config.bytes_per_block
    recomputing = CacheConfig(memory_fraction=0.5, swap_bytes=2 * GIB, preemption_mode="recompute")
    config = cut_kv_memory(recomputing, geometry(), CUDA, step_bytes=GIB)
    assert (config.num_host_blocks, config.num_blocks) == (0, 34 * GIB // config.bytes_per_block)


def test_too_little_memory_names_the_setting_and_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, free=70, total=80, reserved=4)
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization: 0 bytes .* beside the weights and .* for a step hold 0"
    ):
        cut_kv_memory(CacheConfig(gpu_memory_utilization=0.5), geometry(), CUDA, step_bytes=40 * GIB)


@pytest.mark.parametrize(
    ("cache", "setting"),
    [(CacheConfig(memory_bytes=2**60), "kv_memory"), (CacheConfig(num_blocks=2**50), "num_blocks")],
)
def test_a_pool_that_can_not_be_allocated_names_the_setting_that_sized_it(cache: CacheConfig, setting: str) -> None:
    config = cut_kv_memory(cache, geometry(), torch.device("cpu"))
    with pytest.raises(ConfigError, match="can't be allocated") as refused:
        KVTensors(config, [TorchReferenceBackend()] * len(config.all_groups), torch.device("cpu"))
    assert refused.value.field == setting


def test_a_length_that_the_pool_can_not_hold_is_refused_with_one_that_it_can() -> None:
    groups = geometry().groups
    config = KVCacheConfig(11, BLOCK_SIZE, groups)
    by_memory = CacheConfig(gpu_memory_utilization=0.5)
    verify_longest_sequence(config, by_memory, 160)
    with pytest.raises(
        ConfigError, match=r"max_model_len: 161 tokens need .* at most 160, a larger gpu_memory_utilization"
    ):
        verify_longest_sequence(config, by_memory, 161)


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        (CacheConfig(memory_bytes=GIB), "kv_memory: 132.0 KiB for keys and values hold 160 tokens, .* needs 144.0 KiB"),
        (CacheConfig(num_blocks=11), "num_blocks: .* hold 160 tokens, and max_model_len is 161: .* needs 12;"),
    ],
)
def test_a_pool_of_a_given_size_that_can_not_hold_the_longest_request_is_warned_of(
    caplog: pytest.LogCaptureFixture, cache: CacheConfig, expected: str
) -> None:
    """It is what was asked for, and serves shorter ones."""
    config = KVCacheConfig(11, BLOCK_SIZE, geometry().groups)
    verify_longest_sequence(config, cache, 160)
    assert not caplog.records
    verify_longest_sequence(config, cache, 161)
    (record,) = caplog.records
    assert re.match(expected, record.getMessage()) and record.getMessage().endswith("a max_model_len of 160 fits")


@pytest.mark.parametrize(
    ("budget", "seqs", "longest", "lengths"),
    [
        (64, 4, 128, [61, 1, 1, 1]),
        (64, 4, 30, [21, 21, 21, 1]),  # no prompt is longer than a sequence may be
        (64, 2, 20, [20, 20]),  # more than the sequences can hold
        (2, 4, 128, [1, 1, 1, 1]),
    ],
)
def test_the_largest_step_fills_the_budget_and_samples_everywhere(
    budget: int, seqs: int, longest: int, lengths: list[int]
) -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=seqs)
    plan = largest_step(scheduler, [BLOCK_SIZE] * 2, longest)
    assert list(plan.num_scheduled_tokens.values()) == lengths
    assert plan.total_num_scheduled_tokens == sum(lengths)
    assert plan.sampled_req_ids == list(plan.num_scheduled_tokens)
    blocks = [block for new in plan.scheduled_new_reqs for table in new.block_ids for block in table]
    assert blocks == list(range(1, num_blocks_of(plan))), "a block of its own for everything that is written"


def test_the_largest_step_is_one_that_a_runner_executes() -> None:
    driver = Driver(TWO_GROUPS)
    scheduler = SchedulerConfig(max_num_batched_tokens=128, max_num_seqs=8)
    plan = largest_step(scheduler, [BLOCK_SIZE] * len(driver.groups), TWO_GROUPS.config.max_position)
    assert num_blocks_of(plan) <= 40, "what the driver's runner has"
    driver.runner.execute_model(plan)
    assert len(driver.runner.sample_tokens().sampled_token_ids) == 8


class FakeRunner:
    """Allocates as a runner would, by the figures of the fake device."""

    def __init__(self, device: dict[str, int], error: Exception | None = None) -> None:
        self._device = device
        self._error = error
        device["allocated"] += 3 * GIB + GIB  # its KV cache, and tables

    def execute_model(self, plan: object) -> None:
        if self._error is not None:
            raise self._error
        self._device["peak"] = self._device["allocated"] + 5 * GIB

    def sample_tokens(self) -> ModelRunnerOutput:
        return ModelRunnerOutput()


def fake_device(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    device = {"allocated": 10 * GIB, "peak": 40 * GIB, "emptied": 0}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: device["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: device["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: device.update(peak=device["allocated"]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: device.update(emptied=1))
    return device


def test_a_step_is_measured_without_weights_and_without_its_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_device(monkeypatch)
    plan = largest_step(SchedulerConfig(), [BLOCK_SIZE], 128)
    assert measure_step(plan, 3 * GIB, lambda: FakeRunner(device), CUDA) == 6 * GIB  # type: ignore[arg-type,return-value]
    assert device["emptied"], "what the step used is free for the pool"


def test_a_step_that_does_not_fit_names_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_device(monkeypatch)
    plan = largest_step(SchedulerConfig(max_num_batched_tokens=512), [BLOCK_SIZE], 128)
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: a step of 512 tokens .* does not fit"):
        measure_step(plan, 3 * GIB, lambda: FakeRunner(device, error), CUDA)  # type: ignore[arg-type,return-value]


def test_the_speed_of_prompts_is_that_of_the_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_device(monkeypatch)
    clock = iter([0.0, 9.0, 10.0, 10.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    plan = one_prompt(SchedulerConfig(max_num_batched_tokens=4096), [BLOCK_SIZE], 1000)
    assert list(plan.num_scheduled_tokens.values()) == [1000]
    seconds = measure_prefill(plan, lambda: FakeRunner(device), CUDA)  # type: ignore[arg-type,return-value]
    assert seconds == 0.5 / 1000 and device["emptied"]
    assert plan.finished_req_ids == list(plan.num_scheduled_tokens), "the second run begins anew"


def test_weights_that_do_not_fit_are_refused_with_a_size_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, free=12, total=16, reserved=0)
    words = r"weights are 15\.0 GiB in bfloat16, and 12\.0 GiB of cuda were free; .* fewer than 6\.4 billion weights"
    with pytest.raises(ModelError, match=words), refusing_what_does_not_fit("m", 15 * 2**29, CUDA, torch.bfloat16):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="other"), refusing_what_does_not_fit("m", 1, CUDA, torch.bfloat16):
        raise RuntimeError("other")


def test_a_sequence_needs_a_block_for_each_size_of_its_groups() -> None:
    groups = tuple(
        KVCacheGroup(FullAttentionSpec(block_size, 1, 8, "float32"), (layer,))
        for layer, block_size in enumerate((16, 32))
    )
    kv_config = KVCacheConfig(8, 16, groups)  # 7 blocks that can be used: 32 tokens take 2 of one group, 1 of the other
    assert (kv_config.whole_blocks, kv_config.capacity) == (32, 64)
    verify_longest_sequence(kv_config, CacheConfig(), 64)
    with pytest.raises(ConfigError, match="at most 64"):
        verify_longest_sequence(kv_config, CacheConfig(), 65)
