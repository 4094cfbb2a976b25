"""What a fork costs in bookkeeping, and what the same tokens cost a new request that has the prefix cache alone.

    python bench/fork.py [--tokens 1000 10000] [--rounds 200]

The parent has ended and is leased: all its tokens but the last are computed, and the last block is partly full. Every
round does each thing once, so that ratios are within a round. Times are CPU time of this thread; no model is run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.sequence import TokenSequence

BLOCK_SIZE = 16
SUFFIX = [1, 2, 3, 4, 5]
LIMIT_TOKENS, LIMIT_MICROSECONDS = 10_000, 100

FORK = "fork"
FIRST_WRITE = "first write after it (copy-on-write)"
FREE = "free of the child"
INHERIT = "inherit (compare the tokens, fork)"
LOOKUP = "prefix cache: hash, look up"
TAKE = "prefix cache: take, make room"
NEW_REQUEST = "prefix cache: all of a new request"
ROWS = (FORK, FIRST_WRITE, FREE, INHERIT, LOOKUP, TAKE, NEW_REQUEST)

Result = TypeVar("Result")


class Stopwatch:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, work: Callable[..., Result], *arguments: object) -> Result:
        start = time.thread_time()
        result = work(*arguments)
        self.seconds[name].append(time.thread_time() - start)
        return result


def manager_for(num_tokens: int) -> KVCacheManager:
    spec = FullAttentionSpec(BLOCK_SIZE, 8, 128, "float16")
    num_blocks = 2 * (num_tokens // BLOCK_SIZE) + 10
    return KVCacheManager(KVCacheConfig(num_blocks, BLOCK_SIZE, (KVCacheGroup(spec, (0,)),)), num_tokens + 100)


def own_numbers(token_ids: list[int]) -> list[int]:
    """The same tokens as a message from another process brings them: objects of their own, slower to compare."""
    return [int(str(token)) for token in token_ids]


def measure(num_tokens: int, num_rounds: int) -> dict[str, list[float]]:
    manager = manager_for(num_tokens)
    rng = random.Random(0)
    tokens = [rng.randrange(1 << 15) for _ in range(num_tokens)]
    running = TokenSequence("parent", tokens)
    num_computed = num_tokens - 1
    assert manager.allocate_slots(running, num_computed) is not None
    running.num_computed_tokens = num_computed
    parent = manager.detach(running)
    watch = Stopwatch()
    for _ in range(num_rounds):
        child = TokenSequence("child", own_numbers(tokens) + SUFFIX)
        watch.time(FORK, manager.fork, parent, child, num_computed)
        assert watch.time(FIRST_WRITE, manager.allocate_slots, child, 1 + len(SUFFIX)) is not None
        assert len(manager.take_block_copies()) == (num_computed % BLOCK_SIZE > 0)
        watch.time(FREE, manager.free, child)

        child = TokenSequence("child", own_numbers(tokens) + SUFFIX)
        count = watch.time(INHERIT, manager.inherit_blocks_from_parent, parent, child, num_tokens)
        assert count == num_computed
        manager.free(child)

        fresh = TokenSequence("fresh", own_numbers(tokens) + SUFFIX)
        hit, num_hit = watch.time(LOOKUP, manager.get_computed_blocks, fresh)
        assert num_hit == num_computed // BLOCK_SIZE * BLOCK_SIZE
        num_new = fresh.num_tokens - num_hit
        assert watch.time(TAKE, manager.allocate_slots, fresh, num_new, hit, num_hit) is not None
        fresh.num_computed_tokens = num_hit
        manager.free(fresh)
    seconds = dict(watch.seconds)
    seconds[NEW_REQUEST] = [lookup + take for lookup, take in zip(seconds[LOOKUP], seconds[TAKE])]
    return seconds


def spread(values: list[float], digits: int) -> str:
    """Median, and the tenth and ninetieth percentiles."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return f"{statistics.median(ordered):9.{digits}f}  ({low:.{digits}f} … {high:.{digits}f})"


def report(num_tokens: int, seconds: dict[str, list[float]]) -> None:
    print(f"\n{num_tokens:,} tokens, {-(-num_tokens // BLOCK_SIZE):,} blocks of {BLOCK_SIZE}")
    print(f"  {'':36}  {'microseconds':>28}  {'a new request ÷ it':>28}")
    for name in ROWS:
        micro = spread([value * 1e6 for value in seconds[name]], 1)
        ratio = spread([whole / value for whole, value in zip(seconds[NEW_REQUEST], seconds[name])], 1)
        print(f"  {name:36}  {micro:>28}  {ratio:>28}")
    if num_tokens == LIMIT_TOKENS:
        median = statistics.median(seconds[FORK]) * 1e6
        verdict = "kept" if median < LIMIT_MICROSECONDS else "MISSED"
        print(f"  limit for a fork: {LIMIT_MICROSECONDS} microseconds; {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000, LIMIT_TOKENS], help="lengths of the parent")
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    print("Median (10th … 90th percentile)")
    for num_tokens in arguments.tokens:
        report(num_tokens, measure(num_tokens, arguments.rounds))


if __name__ == "__main__":
    main()
