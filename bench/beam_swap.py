"""What it costs a beam search to come back after it gave way: with all of it on the host, with its prompt there or in
the prefix cache, and computed again.

    python bench/beam_swap.py [--tokens 128 384] [--width 4] [--length 32] [--rounds 2]

A search has run for a while when others take all memory for a step. Measured is the time from then on until it is one
token further, the copies from the host included, and the tokens that are computed on the way. Rounds alternate between
the four ways, so that ratios are within a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from ratoon import LLM, BeamSearchParams

MODEL = "smollm2-135m"
ALL, PROMPT, CACHED, NOTHING = (
    "all on the host",
    "prompt on the host",
    "prompt in the prefix cache",
    "all computed again",
)
SWAP_MEMORY = {ALL: "256MiB", PROMPT: "256MiB", CACHED: "0", NOTHING: "0"}


@contextmanager
def room_on_host(llm: LLM, num_blocks: int | None) -> Iterator[None]:
    """Leave only so many host blocks free."""
    host = llm._client.core.scheduler.kv_cache._host
    num_taken = 0 if num_blocks is None else host.num_free_blocks - num_blocks
    taken = [host.take() for _ in range(num_taken)]
    try:
        yield
    finally:
        host.free(taken)


def take_all_memory(llm: LLM) -> None:
    """A branch that runs gives way in the step that follows."""
    pool = llm._client.core.scheduler.kv_cache.pool
    taken = pool.get_new_blocks(pool.num_free_blocks)
    before = llm.stats().num_preemptions
    llm.engine.step()
    pool.free_blocks(taken)
    assert llm.stats().num_preemptions == before + 1, "no branch gave way"


def forget_prefixes(llm: LLM) -> None:
    pool = llm._client.core.scheduler.kv_cache.pool
    pool.free_blocks(pool.get_new_blocks(pool.num_free_blocks))


def come_back(llm: LLM, num_tokens: int, width: int, length: int, way: str) -> tuple[float, int]:
    """Seconds, and tokens that were computed."""
    prompt = [1000 + 7 * place % 20_000 for place in range(num_tokens)]
    params = BeamSearchParams(beam_width=width, max_tokens=length + 40, ignore_eos=True)
    num_blocks = -(-num_tokens // llm.config.cache.block_size)
    runner = llm._client.core.executor._worker.runner
    with closing(llm.stream({"prompt_token_ids": prompt}, params)) as stream:
        while len(next(stream).outputs[0].token_ids) < length or not needs_a_block(llm):
            pass
        with room_on_host(llm, num_blocks if way == PROMPT else None):
            take_all_memory(llm)
        if way != CACHED:
            forget_prefixes(llm)
        start, num_computed = time.perf_counter(), runner.num_computed_tokens
        next(stream)
        return time.perf_counter() - start, runner.num_computed_tokens - num_computed


def needs_a_block(llm: LLM) -> bool:
    """Memory is asked for in the next step alone if that writes the first token of a block."""
    (group,) = (trunk.request.task for trunk in llm._client.core.scheduler.state.all_or_none.values())
    return (group.trunk.num_tokens + group.search.num_tokens - 1) % llm.config.cache.block_size == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 384])
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    settings = {"skip_tokenizer": True, "kv_memory": "256MiB"}
    by_size = {size: LLM(MODEL, swap_memory=size, **settings) for size in set(SWAP_MEMORY.values())}
    llms = {way: by_size[size] for way, size in SWAP_MEMORY.items()}
    for num_tokens in args.tokens:
        times: dict[str, list[float]] = {way: [] for way in llms}
        num_computed: dict[str, int] = {}
        for _ in range(args.rounds):
            for way, llm in llms.items():
                seconds, num_computed[way] = come_back(llm, num_tokens, args.width, args.length, way)
                times[way].append(seconds)
                llm.reset_prefix_cache()
        print(f"prompt of {num_tokens} tokens, {args.width} beams with {args.length} tokens or a few more:")
        for way, found in times.items():
            ratio = statistics.median(seconds / best for seconds, best in zip(found, times[ALL]))
            median = 1000 * statistics.median(found)
            print(f"  {way:<28} {num_computed[way]:6} tokens {median:8.0f} ms   {ratio:6.2f}×", flush=True)


if __name__ == "__main__":
    main()
