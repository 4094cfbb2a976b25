"""What it costs a beam search to come back after it gave way: with its prompt on the host, and computed again.

    python bench/beam_swap.py [--tokens 256 1024] [--width 4] [--length 16] [--rounds 3]

A search has run for a while when others take all memory for a step, the cached prompt included. Measured is the time
from then on until it is one token further. Rounds alternate between the two ways, so that ratios are within a round. A
third row is the share that is behind the prompt, which is computed again either way: its time with nothing to compute
of the prompt, from the prefix cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import closing

from ratoon import LLM, BeamSearchParams

MODEL = "smollm2-135m"
SWAPPED, COMPUTED, CACHED = "prompt on the host", "prompt computed again", "prompt in the prefix cache"
SWAP_MEMORY = {SWAPPED: "256MiB", COMPUTED: "0", CACHED: "0"}


def take_all_memory(llm: LLM) -> None:
    """Whoever runs gives way in the step that follows."""
    pool = llm._client.core.scheduler.kv_cache.pool
    taken = pool.get_new_blocks(pool.num_free_blocks)
    before = llm.stats().num_preemptions
    llm._step()
    pool.free_blocks(taken)
    assert llm.stats().num_preemptions == before + 1, "nobody gave way"


def forget_prefixes(llm: LLM) -> None:
    pool = llm._client.core.scheduler.kv_cache.pool
    pool.free_blocks(pool.get_new_blocks(pool.num_free_blocks))


def seconds_to_come_back(llm: LLM, num_tokens: int, width: int, length: int, way: str) -> float:
    prompt = [1000 + 7 * place % 20_000 for place in range(num_tokens - 1)]
    params = BeamSearchParams(beam_width=width, max_tokens=length + 40, ignore_eos=True)
    with closing(llm.stream({"prompt_token_ids": prompt}, params)) as stream:
        while len(next(stream).outputs[0].token_ids) < length or not needs_a_block(llm):
            pass
        take_all_memory(llm)
        if way != CACHED:
            forget_prefixes(llm)
        start = time.perf_counter()
        next(stream)
        return time.perf_counter() - start


def needs_a_block(llm: LLM) -> bool:
    """Memory is asked for in the next step alone if that writes the first token of a block."""
    (group,) = llm._client.core.scheduler.roster.searching.values()
    return (group.trunk.num_tokens + group.search.num_tokens - 1) % llm.config.cache.block_size == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    settings = {"skip_tokenizer": True, "kv_memory": "256MiB"}
    llms = {way: LLM(MODEL, swap_memory=size, **settings) for way, size in SWAP_MEMORY.items()}
    for num_tokens in args.tokens:
        times: dict[str, list[float]] = {way: [] for way in llms}
        for _ in range(args.rounds):
            for way, llm in llms.items():
                times[way].append(seconds_to_come_back(llm, num_tokens, args.width, args.length, way))
                llm.reset_prefix_cache()
        print(f"prompt of {num_tokens} tokens, {args.width} beams with {args.length} tokens or a few more:")
        for way, seconds in times.items():
            ratio = statistics.median(found / best for found, best in zip(seconds, times[SWAPPED]))
            print(f"  {way:<28} {1000 * statistics.median(seconds):8.0f} ms   {ratio:6.2f}×")


if __name__ == "__main__":
    main()
