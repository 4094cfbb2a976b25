"""Files of blocks that ranks of one model share out: each rank keeps its part. An engine that starts again computes
only what is new, and a block of which one rank's part is missing or damaged is computed by all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("workers in processes need Linux", allow_module_level=True)

from tests.golden.engines import engine, greedy, run, tokens_of
from tests.golden.tiny_models import random_token_ids
from tests.waiting import wait_until

FAMILY = "llama with grouped heads"
NUM_RANKS = 2
PROMPTS = [random_token_ids(length, seed=length) for length in (70, 35, 40, 45)]
NUM_TOKENS = 6
NUM_BLOCKS = [(len(prompt) + NUM_TOKENS - 1) // 16 for prompt in PROMPTS]  # the last token of a text is not computed


def files_of(folder: Path) -> set[Path]:
    return set(folder.rglob("*.kv"))


@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"])
def test_ranks_keep_their_parts_and_compute_what_one_of_them_lacks(tmp_path, settings):
    settings = settings | {"kv_files": str(tmp_path), "swap_memory": "1MiB"}
    with engine(FAMILY) as llm:
        expected = tokens_of(run(llm, PROMPTS, greedy(NUM_TOKENS)))
    written = []  # files, by prompt
    with engine(FAMILY, **settings) as llm:
        for prompt, num_blocks, tokens in zip(PROMPTS, NUM_BLOCKS, expected):
            before = files_of(tmp_path)
            num_expected = len(before) + NUM_RANKS * num_blocks
            (output,) = run(llm, [prompt], greedy(NUM_TOKENS))
            assert (tokens_of([output]), output.num_cached_tokens) == ([tokens], 0)
            run(llm, [[3, 4]], greedy(1))  # a step behind the end of the text, in which its blocks are saved
            wait_until("its blocks have files", lambda count=num_expected: len(files_of(tmp_path)) == count)
            written.append(files_of(tmp_path) - before)
    kinds = sorted({path.parent.parent.name for path in files_of(tmp_path)})
    assert len(kinds) == NUM_RANKS
    blocks = [{path.name for path in files_of(tmp_path / kind)} for kind in kinds]
    assert blocks[0] == blocks[1], "every rank has a part of every block"
    for path in written[1]:
        if path.is_relative_to(tmp_path / kinds[1]):
            path.unlink()
    for kind, files in zip(kinds, written[2:], strict=True):  # each rank finds damage in one of the prompts
        for path in files & files_of(tmp_path / kind):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    with engine(FAMILY, **settings) as llm:
        again = run(llm, PROMPTS, greedy(NUM_TOKENS))  # at once: it is not known yet how long a load takes
        assert tokens_of(again) == expected
        assert [output.num_cached_tokens for output in again] == [64, 0, 0, 0]
    assert files_of(tmp_path) == set().union(*written), "what was spoilt is written again"
