"""How much memory the KV cache gets: from the settings, from what is free, and from what the largest step needs."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.errors import ConfigError
from ratoon.core.kv import KVCacheConfig, bytes_per_block, tokens_in
from ratoon.core.params import SamplingParams
from ratoon.core.plan import NewRequestData, SchedulerOutput
from ratoon.core.sizes import format_size
from ratoon.execution.kv.geometry import Geometry
from ratoon.execution.kv.kv_tensors import staging_size

if TYPE_CHECKING:
    from ratoon.execution.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Defaults: a GPU is normally the engine's alone, host memory is shared with other processes.
KV_FRACTION = {"cuda": 0.85, "cpu": 0.4}
CPU_KV_LIMIT = 4 * 2**30
PROMPT_TOKENS = 2048  # of the prompt by which the speed of computing prompts is measured, at most


def cut_kv_memory(cache: CacheConfig, geometry: Geometry, device: torch.device, step_bytes: int = 0) -> KVCacheConfig:
    """The number of blocks: as configured, or as many as the memory allows beside the largest step, which needs
    `step_bytes`."""
    groups, cross = geometry.groups, geometry.cross
    price = bytes_per_block(groups if cross is None else (*groups, cross), geometry.attached)
    num_host_blocks = 0 if cache.preemption_mode == "recompute" else cache.host_bytes // price
    if cache.connectors and not num_host_blocks:
        problem = f"{cache.host_bytes:,} bytes hold no block, through which those of {cache.connectors[0][0]!r} pass"
        raise ConfigError("swap_memory", problem, f"at least {price:,} bytes; many blocks at a time need more")
    if num_host_blocks and device.type == "cuda":
        step_bytes += staging_size(price, num_host_blocks)[0] * price
    num_blocks = cache.num_blocks
    if num_blocks is None:
        memory = max(0, _kv_bytes(cache, device, step_bytes))
        num_blocks = memory // price
        if num_blocks < 2:
            beside = f" beside the weights and {step_bytes:,} bytes for a step" if step_bytes else ""
            raise ConfigError(
                _memory_setting(cache),
                f"{memory:,} bytes for keys and values{beside} hold {num_blocks} blocks of {price:,} bytes",
                f"at least 2 blocks are needed: {2 * price:,} bytes",
            )
    sized_by = _memory_setting(cache)
    return KVCacheConfig(
        num_blocks, cache.block_size, groups, cross, num_host_blocks, sized_by, attached=geometry.attached
    )


def _kv_bytes(cache: CacheConfig, device: torch.device, step_bytes: int) -> int:
    if cache.memory_bytes is not None:
        return cache.memory_bytes
    if cache.gpu_memory_utilization is not None and device.type == "cuda":
        return share_of_gpu(device, cache.gpu_memory_utilization) - step_bytes
    fraction = cache.memory_fraction or KV_FRACTION[device.type] / cache.num_sharers
    memory = int(free_memory(device) * fraction) - step_bytes
    if device.type == "cpu" and cache.memory_fraction is None:
        memory = min(memory, CPU_KV_LIMIT)
    return memory


def sizes_by_memory(cache: CacheConfig) -> bool:
    """Whether the number of blocks follows from the memory of the device, and neither it nor its bytes are set."""
    return cache.num_blocks is None and cache.memory_bytes is None


def _memory_setting(cache: CacheConfig) -> str:
    """The setting that limits the memory."""
    if cache.num_blocks is not None:
        return "num_blocks"
    if cache.memory_bytes is not None:
        return "kv_memory"
    return "kv_memory_fraction" if cache.gpu_memory_utilization is None else "gpu_memory_utilization"


def verify_longest_sequence(kv_config: KVCacheConfig, cache: CacheConfig, longest: int) -> None:
    """ConfigError, with the length that fits, if a pool that was sized by the device's memory can't hold a sequence of
    the greatest length. Of a pool whose size was set there is a warning: shorter requests are served."""
    growing = [group for group in kv_config.groups if group.spec.growth == "full"]
    if not growing:
        return
    room = tokens_in(kv_config.num_blocks - 1, growing)
    if room >= longest:
        return
    has = kv_config.num_blocks * kv_config.bytes_per_block
    needed_blocks = 1 + sum(-(-longest // group.spec.block_size) for group in growing)
    needed = needed_blocks * kv_config.bytes_per_block
    if sizes_by_memory(cache):
        problem = f"{longest:,} tokens need {gib(needed)} for keys and values, and {gib(has)} are left for them"
        expected = f"at most {room:,}, a larger {_memory_setting(cache)}, or a smaller model"
        raise ConfigError("max_model_len", problem, expected)
    enough = f"{needed_blocks:,}" if cache.num_blocks is not None else format_size(needed)
    logger.warning(
        "%s: %s for keys and values hold %s tokens, and max_model_len is %s: longer requests are refused. That length "
        "needs %s; a max_model_len of %s fits",
        _memory_setting(cache), format_size(has), f"{room:,}", f"{longest:,}", enough, f"{room:,}",
    )  # fmt: skip


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def share_of_gpu(device: torch.device, utilization: float) -> int:
    """The memory that this fraction of a GPU leaves for blocks next to the loaded weights. As in vLLM, it is a limit
    for one engine, regardless of what else is on the device."""
    free, total = torch.cuda.mem_get_info(device)
    memory = int(total * utilization) - torch.cuda.memory_reserved(device)
    if memory > free:
        problem = f"{utilization} of {total:,} bytes leave {memory:,} for the KV cache, and {free:,} are free"
        raise ConfigError("gpu_memory_utilization", problem, "less of it, or end what else uses the GPU")
    return max(memory, 0)


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return 8 * 2**30  # the system does not report it


# ---- what the largest step needs ----


def largest_step(scheduler: SchedulerConfig, block_sizes: Sequence[int], max_model_len: int) -> SchedulerOutput:
    """A plan that fills the token budget and samples for as many sequences as there may be: as few prompts as hold the
    budget, beside sequences with one token each."""
    num_seqs = scheduler.max_num_seqs
    num_tokens = max(scheduler.token_budget, num_seqs)
    num_prompts = min(num_seqs, -(-num_tokens // max_model_len))
    budget = min(num_tokens - (num_seqs - num_prompts), num_prompts * max_model_len)
    lengths = [budget // num_prompts + (index < budget % num_prompts) for index in range(num_prompts)]
    lengths += [1] * (num_seqs - num_prompts)
    plan = SchedulerOutput()
    next_block = 1
    for index, length in enumerate(lengths):
        tables = []
        for block_size in block_sizes:
            num_blocks = -(-length // block_size)
            tables.append(list(range(next_block, next_block + num_blocks)))
            next_block += num_blocks
        params = SamplingParams(temperature=1.0)
        req_id = f"profile-{index}"
        plan.scheduled_new_reqs.append(NewRequestData(req_id, [0] * length, length, params, index, tuple(tables), 0))
        plan.num_scheduled_tokens[req_id] = length
        plan.sampled_req_ids.append(req_id)
    plan.total_num_scheduled_tokens = sum(lengths)
    return plan


def one_prompt(scheduler: SchedulerConfig, block_sizes: Sequence[int], max_model_len: int) -> SchedulerOutput:
    """A plan of one prompt that fills the token budget, up to PROMPT_TOKENS."""
    num_tokens = min(scheduler.token_budget, PROMPT_TOKENS)
    alone = replace(scheduler, max_num_batched_tokens=num_tokens, max_num_seqs=1)
    return largest_step(alone, block_sizes, max_model_len)


def num_blocks_of(plan: SchedulerOutput) -> int:
    """Blocks that a plan of new requests writes to, and the null block."""
    return 1 + sum(len(table) for new in plan.scheduled_new_reqs for table in new.block_ids)


def measure_step(
    plan: SchedulerOutput, kv_bytes: int, make_runner: Callable[[], ModelRunner], device: torch.device
) -> int:
    """Bytes that a runner needs on the GPU for this step beside the weights and its KV cache of `kv_bytes`: its own
    tables and the activations at their peak. The runner is gone afterwards. ConfigError if the step does not fit."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        runner = make_runner()
        runner.execute_model(plan)
        runner.sample_tokens()
        torch.cuda.synchronize(device)
    except (torch.OutOfMemoryError, ConfigError) as error:  # the latter: of the KV cache
        num_tokens = plan.total_num_scheduled_tokens
        problem = f"a step of {num_tokens:,} tokens of {len(plan.num_scheduled_tokens):,} sequences does not fit"
        expected = f"fewer than {num_tokens:,}, a smaller max_num_seqs, or a smaller model"
        raise ConfigError(
            "max_num_batched_tokens", f"{problem} into the memory beside the weights", expected
        ) from error
    peak = torch.cuda.max_memory_allocated(device) - before - kv_bytes
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return max(0, peak)


def measure_encoder(run: Callable[[], None], num_rows: int, device: torch.device) -> int:
    """Bytes that `run`, which makes `num_rows` rows of embeddings of images, needs on the GPU beside the weights.
    ConfigError if that does not fit."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        run()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        problem = f"{num_rows:,} rows of embeddings of images can't be made in one step beside the weights"
        raise ConfigError("max_num_encoder_tokens", problem, "fewer, or a smaller model") from error
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return max(0, peak)


def measure_prefill(plan: SchedulerOutput, make_runner: Callable[[], ModelRunner], device: torch.device) -> float:
    """Seconds that a token of this plan takes. It is run twice: the first time compiles kernels. The runner is gone
    afterwards."""
    runner, seconds = make_runner(), 0.0
    for _ in range(2):
        begin = time.perf_counter()
        runner.execute_model(plan)
        runner.sample_tokens()
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
        plan.finished_req_ids = list(plan.num_scheduled_tokens)
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return seconds / plan.total_num_scheduled_tokens
