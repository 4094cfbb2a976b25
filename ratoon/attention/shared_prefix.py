"""Which requests of a step share a prefix of their keys (beams, `n > 1`, common prompts), found from block tables."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MIN_SHARED = 64  # keys of a prefix that requests attend to together
MIN_SAVED = 2**14  # keys that are read less often because of it: fewer are not worth the launches


class PrefixRuns(NamedTuple):
    """Requests of a step in runs that share a prefix, which all rows of a run attend to together. A request without one
    is a run of its own, with a prefix of no keys; behind the last prefix there are no runs."""

    starts: np.ndarray  # [runs + 1] the first token of each run among those of the step, and the end of the last run
    firsts: np.ndarray  # [runs] the first request of each
    prefix_lens: np.ndarray  # [runs]
    begins: np.ndarray  # [R] the first key of each request behind its prefix


def shared_prefixes(block_table: np.ndarray, seq_lens: np.ndarray, block_size: int) -> np.ndarray:
    """[R] int32: how many keys a request shares with the request before it, by their tables; 0 for the first.

    Only keys that both have count: entries beyond a request's end are the null block or undefined.
    """
    shared = np.zeros(len(seq_lens), dtype=np.int32)
    first = block_table[:, 0]
    alike = np.flatnonzero((first[1:] == first[:-1]) & (first[1:] != 0)) + 1  # a null block: freed by a sliding window
    if len(alike) == 0:
        return shared
    shorter = np.minimum(seq_lens[alike], seq_lens[alike - 1])
    width = -(-int(shorter.max()) // block_size)
    if width == 0:  # padding without keys, whose tables are those of an earlier step
        return shared
    table = block_table[:, :width]
    differs = table[alike] != table[alike - 1]
    num_blocks = differs.argmax(axis=1)  # the first that differs; never 0, because the first blocks are equal
    num_blocks[num_blocks == 0] = width  # none differs
    shared[alike] = np.minimum(num_blocks * block_size, shorter)
    return shared


def group_prefixes(shared: np.ndarray, limits: np.ndarray, min_shared: int) -> tuple[np.ndarray, np.ndarray]:
    """Runs of requests with a common prefix: the first request of each run, and the length of its prefix (0 for a run
    of one). `shared`: see shared_prefixes; `limits` [R]: no prefix is longer than that of each request in its run.

    A request joins the run before it unless that would cut the prefix of the run by more than half.
    """
    firsts, prefixes = [0], [0]
    candidates = np.minimum(shared[1:], np.minimum(limits[1:], limits[:-1])).tolist()
    for request, candidate in enumerate(candidates, start=1):
        if candidate >= min_shared and (prefixes[-1] == 0 or candidate * 2 >= prefixes[-1]):
            prefixes[-1] = candidate if prefixes[-1] == 0 else min(candidate, prefixes[-1])
        else:
            firsts.append(request)
            prefixes.append(0)
    return np.array(firsts, np.int32), np.array(prefixes, np.int32)


def find_runs(shared: np.ndarray, limits: np.ndarray, query_start_loc: np.ndarray) -> PrefixRuns | None:
    """The runs of a step, for what shared_prefixes has found; `limits`: see group_prefixes. None: too little would be
    saved."""
    if shared.sum() < MIN_SAVED:
        return None
    firsts, prefixes = group_prefixes(shared, limits, MIN_SHARED)
    sizes = np.diff(np.append(firsts, len(shared)))
    if (prefixes * (sizes - 1)).sum() < MIN_SAVED:
        return None
    count = int(np.flatnonzero(prefixes)[-1]) + 1
    starts = query_start_loc[np.append(firsts, len(shared))[: count + 1]]
    return PrefixRuns(starts, firsts[:count], prefixes[:count], np.repeat(prefixes, sizes))
