"""Prompts computed apart from answers, together with files of blocks and with ranks: the same answers as of one engine,
to the bit, after a restart too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ratoon.core.errors import RequestError
from ratoon.core.kv_transfer import KVTransfer
from ratoon.core.request import EngineCoreRequest
from tests.golden.engines import engine, scheduler_of
from tests.golden.every_kind import greedy, open_engine
from tests.golden.grammar_engines import FAMILY, grammar_folder
from tests.golden.test_prefill_decode import (
    LONG,
    PEER_FAMILY,
    ask_long,
    client_of,
    core_of,
    figures_of,
    peers,
    run,
    tokens_of,
)
from tests.golden.tiny_models import random_token_ids

SPLIT = {"prefill_engines": 1, "decode_engines": 1, "prefill_threshold": 1, "swap_memory": "4MiB"}
SMALL = {"max_num_batched_tokens": 32, "num_blocks": 64}
RANKS = {"tensor_parallel_size": 2}
in_processes = pytest.mark.skipif(sys.platform != "linux", reason="workers in processes need Linux")


def right_answers(**settings: Any) -> list[Any]:
    with open_engine(grammar_folder(FAMILY), **SMALL, **settings) as llm:
        return ask_long(llm)


def check_split(right: list[Any], **settings: Any) -> None:
    """Asks engines of which one computes prompts, and checks that blocks were moved and nothing is left."""
    with open_engine(grammar_folder(FAMILY), **SMALL, **SPLIT, **settings) as llm:
        assert ask_long(llm) == right
        stores = figures_of(llm)
        assert stores[0]["stored"] > 0 and stores[1]["loaded"] > 0
        assert not client_of(llm)._prefills
        for books in llm._client._wait(llm._client._client.call_utility("check")):
            assert books["num_requests"] == 0


# ---- files ----


def test_engines_for_prompts_and_answers_share_files_which_outlive_them(tmp_path: Path) -> None:
    files, suffix = {"kv_files": str(tmp_path)}, random_token_ids(15, seed=2)
    with open_engine(grammar_folder(FAMILY), **SMALL) as llm:
        right = ask_long(llm)
        (root,) = llm.generate(LONG[2:], greedy(6), progress=False)
        later = llm.generate_continuation(root, suffix, greedy(6))
    check_split(right, **files)
    with open_engine(grammar_folder(FAMILY), **SMALL, **SPLIT, **files) as llm:
        llm.generate(LONG[2:], greedy(6), "a-name", progress=False)
    with open_engine(grammar_folder(FAMILY), **SMALL, **SPLIT, **files) as llm:
        more = llm.generate_continuation("a-name", suffix, greedy(6))
        assert list(more.outputs[0].token_ids) == list(later.outputs[0].token_ids)
        assert more.num_cached_tokens >= 80, "what an earlier service has written is loaded"
        assert ask_long(llm) == right


def test_what_is_to_stay_in_memory_is_sent_and_not_written(tmp_path: Path) -> None:
    files = {"kv_files": str(tmp_path)}
    with open_engine(grammar_folder(FAMILY), **SMALL, **SPLIT, **files) as llm:
        llm.generate(LONG[:1], greedy(6), retention="in_memory", progress=False)
        assert figures_of(llm)[1]["loaded"] == 6, "it was sent"
        for seed in range(12):  # others take the blocks of the device, and of host memory
            other = random_token_ids(100, seed=300 + seed)
            llm.generate([other], greedy(2), retention="in_memory", progress=False)
    assert not list(tmp_path.rglob("*.kv"))
    with open_engine(grammar_folder(FAMILY), **SMALL, **SPLIT, **files) as llm:
        llm.generate(LONG[:1], greedy(6), progress=False)
    assert len(list(tmp_path.rglob("*.kv"))) == 6


def test_engines_of_your_own_move_blocks_and_keep_them(tmp_path: Path) -> None:
    """Each with a folder of its own: the second one finds after a restart what was sent to it before."""
    asked = EngineCoreRequest("a", LONG[0], greedy(8))
    with engine(PEER_FAMILY) as llm:
        right = tokens_of(run(core_of(llm), asked))
    both = peers(tmp_path / "sockets")
    with (
        engine(PEER_FAMILY, **both, kv_files=str(tmp_path / "one")) as first,
        engine(PEER_FAMILY, **both, kv_files=str(tmp_path / "two")) as second,
    ):
        run(core_of(first), EngineCoreRequest("p", LONG[0], greedy(1), kv_transfer=KVTransfer("t")))
        asked.kv_transfer = KVTransfer("t", core_of(first).kv_address)
        outputs = run(core_of(second), asked)
        assert tokens_of(outputs) == right and outputs[0].num_cached_tokens == 96
        for llm in (first, second):
            scheduler_of(llm).check()
    asked.kv_transfer = None
    with engine(PEER_FAMILY, **both, kv_files=str(tmp_path / "two")) as second:
        outputs = run(core_of(second), asked)
        assert tokens_of(outputs) == right and outputs[0].num_cached_tokens == 96


# ---- ranks ----


@in_processes
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [RANKS, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_send_their_parts_of_blocks_to_the_same_ranks(ranks: dict[str, Any], tmp_path: Path) -> None:
    """Sums of two ranks have an order of their own: numbers are compared with those of one engine of two ranks."""
    right = right_answers(**ranks)
    check_split(right, **ranks)
    check_split(right, **ranks, kv_files=str(tmp_path))


@in_processes
def test_engines_with_other_numbers_of_ranks_are_refused_by_name(tmp_path: Path) -> None:
    asked = EngineCoreRequest("a", LONG[0], greedy(8))
    with engine(PEER_FAMILY) as llm:
        right = tokens_of(run(core_of(llm), asked))
    with (
        engine(PEER_FAMILY, **RANKS, **peers(tmp_path)) as first,
        engine(PEER_FAMILY, **RANKS, **peers(tmp_path)) as second,
        engine(PEER_FAMILY, **peers(tmp_path)) as alone,
    ):
        run(core_of(first), EngineCoreRequest("p", LONG[0], greedy(1), kv_transfer=KVTransfer("t")))
        asked.kv_transfer = KVTransfer("t", core_of(first).kv_address)
        with pytest.raises(RequestError, match="parts of 2 ranks, those of this engine in 1"):
            core_of(alone).add_request(asked)
        other = EngineCoreRequest("b", LONG[0], greedy(8), kv_transfer=KVTransfer("t", core_of(alone).kv_address))
        with pytest.raises(RequestError, match="parts of 1 ranks, those of this engine in 2"):
            core_of(second).add_request(other)
        outputs = run(core_of(second), asked)
        assert tokens_of(outputs) == right and outputs[0].num_cached_tokens == 96
