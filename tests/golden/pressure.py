"""Memory pressure at a chosen moment: every free block is held by the test for as long as needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ratoon.api.llm import LLM
from tests.golden.engines import scheduler_of


@contextmanager
def no_free_memory(llm: LLM) -> Iterator[None]:
    """Meanwhile blocks are only available from leases or by preemption. Cached free blocks are dropped."""
    pool = scheduler_of(llm).kv_cache.pool
    taken = pool.get_new_blocks(pool.num_free_blocks)
    try:
        yield
    finally:
        pool.free_blocks(taken)


def step_without_free_memory(llm: LLM) -> int:
    """An engine step; two if one is in flight, because nothing is preempted before its result. Returns the
    preemptions."""
    before = llm.stats().num_preemptions
    with no_free_memory(llm):
        for _ in range(llm._client.core.config.scheduler.num_in_flight):
            if llm.stats().num_preemptions == before:
                llm.engine.step()
    scheduler_of(llm).check()
    return llm.stats().num_preemptions - before
