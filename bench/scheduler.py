"""What the scheduler costs for each step, without a model: medians and spreads, in a table.

    python bench/scheduler.py [--running 1 100 1000] [--pools 10000 1000000] [--steps 120] [--fork-tokens 1000 10000]

A fork of a leased parent is measured beside a new request that finds the same tokens in the prefix cache: every round
does each once, so that ratios are within a round. The limit for a fork of 10,000 tokens is 100 µs. Decoding branches
have random lengths, so that in every step about one in sixteen, the block size, needs a new block. Times are CPU time
of this thread (nothing here waits), without the runner's part.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.sequence import TokenSequence
from ratoon.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
SUFFIX = [1, 2, 3, 4, 5]
FORK = "fork"
FIRST_WRITE = "first write after it (copy-on-write)"
FREE = "free of the child"
INHERIT = "inherit (compare the tokens, fork)"
LOOKUP = "prefix cache: hash, look up"
TAKE = "prefix cache: take, make room"
NEW_REQUEST = "prefix cache: all of a new request"
FORK_ROWS = (FORK, FIRST_WRITE, FREE, INHERIT, LOOKUP, TAKE, NEW_REQUEST)


def kv_config(num_blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(BLOCK_SIZE, 8, 128, "float16")
    return KVCacheConfig(num_blocks, BLOCK_SIZE, (KVCacheGroup(spec, (0,)),))


def describe(seconds: list[float]) -> str:
    """Median, and the tenth and ninetieth percentiles, in microseconds."""
    ordered = sorted(seconds)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return f"{statistics.median(ordered) * 1e6:9.1f}  ({low * 1e6:.1f} … {high * 1e6:.1f})"


def measure_decode(num_running: int, num_blocks: int, num_steps: int) -> tuple[list[float], list[float]]:
    """Seconds of schedule() and of update_from_output(), step by step."""
    rng = random.Random(0)
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=1 << 20, max_num_seqs=num_running),
        CacheConfig(block_size=BLOCK_SIZE),
        kv_config(num_blocks),
        max_model_len=4096,
    )
    for index in range(num_running):
        prompt = [rng.randrange(1 << 15) for _ in range(rng.randint(1, 2 * BLOCK_SIZE))]
        params = SamplingParams(max_tokens=num_steps + 10, all_stop_token_ids=[1 << 20])
        scheduler.add_request(EngineCoreRequest(f"request-{index}-0123abcd", prompt, params))
    scheduling, updating = [], []
    for step in range(num_steps + 1):
        start = time.thread_time()
        plan = scheduler.schedule()
        scheduled = time.thread_time()
        result = ModelRunnerOutput(plan.sampled_req_ids, [[rng.randrange(1 << 15)] for _ in plan.sampled_req_ids])
        ready = time.thread_time()
        scheduler.update_from_output(plan, result)
        updated = time.thread_time()
        if step > 0:  # the first one admits all requests
            scheduling.append(scheduled - start)
            updating.append(updated - ready)
    return scheduling, updating


def measure_lookup(num_tokens: int, num_rounds: int) -> tuple[list[float], list[float]]:
    """Seconds to look up a prompt that is cached as a whole: with its hashes still to be computed, and without."""
    manager = KVCacheManager(kv_config(num_tokens // BLOCK_SIZE + 2), num_tokens + 1)
    rng = random.Random(1)
    tokens = [rng.randrange(1 << 15) for _ in range(num_tokens)]
    writer = TokenSequence("writer", tokens)
    assert manager.allocate_slots(writer, num_tokens) is not None
    writer.num_computed_tokens = num_tokens
    manager.free(writer)
    cold, warm = [], []
    for _ in range(num_rounds):
        reader = TokenSequence("reader", tokens)
        for seconds in (cold, warm):
            start = time.thread_time()
            _, num_hit = manager.get_computed_blocks(reader)
            seconds.append(time.thread_time() - start)
            assert num_hit > num_tokens - 2 * BLOCK_SIZE
    return cold, warm


def own_numbers(token_ids: list[int]) -> list[int]:
    """Returns the same tokens as a message from another process brings them: objects of their own, slow to compare."""
    return [int(str(token)) for token in token_ids]


def measure_fork(num_tokens: int, num_rounds: int) -> dict[str, list[float]]:
    """Returns seconds by name. All tokens of the parent but the last are computed; its last block is partly full."""
    manager = KVCacheManager(kv_config(2 * (num_tokens // BLOCK_SIZE) + 10), num_tokens + 100)
    rng = random.Random(0)
    tokens = [rng.randrange(1 << 15) for _ in range(num_tokens)]
    running = TokenSequence("parent", tokens)
    num_computed = num_tokens - 1
    assert manager.allocate_slots(running, num_computed) is not None
    running.num_computed_tokens = num_computed
    parent = manager.detach(running)
    seconds: dict[str, list[float]] = {name: [] for name in FORK_ROWS}

    def timed(name: str, work: Callable[..., Any], *arguments: object) -> Any:
        start = time.thread_time()
        result = work(*arguments)
        seconds[name].append(time.thread_time() - start)
        return result

    for _ in range(num_rounds):
        child = TokenSequence("child", own_numbers(tokens) + SUFFIX)
        timed(FORK, manager.fork, parent, child, num_computed)
        assert timed(FIRST_WRITE, manager.allocate_slots, child, 1 + len(SUFFIX)) is not None
        assert len(manager.take_block_copies()) == (num_computed % BLOCK_SIZE > 0)
        timed(FREE, manager.free, child)
        child = TokenSequence("child", own_numbers(tokens) + SUFFIX)
        assert timed(INHERIT, manager.inherit_blocks_from_parent, parent, child, num_tokens) == num_computed
        manager.free(child)
        fresh = TokenSequence("fresh", own_numbers(tokens) + SUFFIX)
        hit, num_hit = timed(LOOKUP, manager.get_computed_blocks, fresh)
        assert num_hit == num_computed // BLOCK_SIZE * BLOCK_SIZE
        assert timed(TAKE, manager.allocate_slots, fresh, fresh.num_tokens - num_hit, hit, num_hit) is not None
        fresh.num_computed_tokens = num_hit
        manager.free(fresh)
    seconds[NEW_REQUEST] = [lookup + take for lookup, take in zip(seconds[LOOKUP], seconds[TAKE])]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 100, 1000], help="decoding branches")
    parser.add_argument("--pools", type=int, nargs="+", default=[10_000, 1_000_000], help="blocks in the pool")
    parser.add_argument("--steps", type=int, default=120, help="steps for each line")
    parser.add_argument("--lookup-tokens", type=int, default=100_000, help="length of the prompt that is looked up")
    parser.add_argument(
        "--fork-tokens", type=int, nargs="+", default=[1_000, 10_000], help="lengths of a fork's parent"
    )
    arguments = parser.parse_args()

    print("CPU microseconds: median (10th … 90th percentile)\n")
    print(f"{'branches':>8}  {'pool':>9}  {'schedule':>28}  {'update':>28}  {'both':>28}")
    for num_blocks in arguments.pools:
        for num_running in arguments.running:
            scheduling, updating = measure_decode(num_running, num_blocks, arguments.steps)
            both = [a + b for a, b in zip(scheduling, updating)]
            cells = "  ".join(f"{describe(times):>28}" for times in (scheduling, updating, both))
            print(f"{num_running:>8}  {num_blocks:>9}  {cells}")
            gc.collect()
    cold, warm = measure_lookup(arguments.lookup_tokens, 20)
    print(f"\nprefix lookup of {arguments.lookup_tokens} cached tokens")
    print(f"  first time (hashes and finds) {describe(cold)}")
    print(f"  again (finds)                 {describe(warm)}")
    for num_tokens in arguments.fork_tokens:
        print(f"\na fork of {num_tokens:,} tokens {'':<19} {'a new request ÷ it':>40}")
        seconds = measure_fork(num_tokens, 200)
        whole = statistics.median(seconds[NEW_REQUEST])
        for name in FORK_ROWS:
            print(f"  {name:36} {describe(seconds[name]):<28} {whole / statistics.median(seconds[name]):8.1f}")
    start = time.thread_time()
    KVCacheManager(kv_config(1_000_000), 4096)
    print(f"\na pool of 1,000,000 blocks is made in {time.thread_time() - start:.2f} s")


if __name__ == "__main__":
    main()
