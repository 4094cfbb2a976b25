"""Blocks and roots in files: an engine that starts again goes on where another one ended, with the same tokens, and
computes what can't be read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratoon.api.llm import LLM
from ratoon.core.errors import ConfigError
from ratoon.core.params import BeamSearchParams
from ratoon.core.request import InheritedFrom
from ratoon.memory.fetch_times import LEAST_OBSERVED
from tests.depths import both_depths
from tests.golden.engines import engine, greedy, run, scheduler_of, tokens_of
from tests.golden.tiny_models import random_token_ids

FAMILY = "llama with grouped heads"
PROMPTS = [random_token_ids(length, seed=length) for length in (70, 33, 90)]
SHARE = {"swap_memory": "1MiB"}


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def answers(llm: LLM) -> tuple[list[list[int]], list[int | None]]:
    outputs = run(llm, PROMPTS, greedy(20))
    return tokens_of(outputs), [output.num_cached_tokens for output in outputs]


@pytest.fixture(scope="module")
def expected() -> Iterator[list[list[int]]]:
    with engine(FAMILY) as llm:
        yield answers(llm)[0]


@both_depths
def test_a_restarted_engine_finds_what_the_last_one_wrote(tmp_path, expected):
    settings = SHARE | {"kv_files": str(tmp_path)}
    with engine(FAMILY, **settings) as llm:
        assert answers(llm) == (expected, [0, 0, 0])
    with engine(FAMILY, **settings) as llm:
        assert answers(llm) == (expected, [64, 32, 80])
        assert scheduler_of(llm).kv_cache.store.snapshot().loaded == 4 + 2 + 5


@both_depths
def test_roots_of_an_earlier_process_are_continued_and_searched(tmp_path, expected):
    settings = SHARE | {"kv_files": str(tmp_path)}
    suffix, beams = random_token_ids(5, seed=1), BeamSearchParams(beam_width=3, n=2, max_tokens=6)

    def go_on(llm: LLM, parent: str) -> list[Any]:
        return [
            llm.generate_continuation(parent, suffix, greedy(8)),
            llm.generate_continuation(parent, [], greedy(8), at=75),
            llm.generate_continuation(parent, suffix, beams),
        ]

    with engine(FAMILY, **settings) as llm:
        (parent,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], greedy(20), "named", use_tqdm=False)
        wanted = [[list(one.token_ids) for one in output.outputs] for output in go_on(llm, parent.request_id)]
    with engine(FAMILY, **settings) as llm:
        found = go_on(llm, parent.request_id)
        assert [[list(one.token_ids) for one in output.outputs] for output in found] == wanted
        assert found[0].num_cached_tokens == 80  # 90 tokens of the parent: its full blocks


def test_a_lease_goes_on_in_a_restarted_engine_and_holds_its_files(tmp_path, expected):
    """Files have room for the blocks of a few texts; those of the lease were used before all others."""
    with engine(FAMILY, **SHARE, kv_files=str(tmp_path)) as llm:
        run(llm, PROMPTS[:1], greedy(1))
    size = max(file.stat().st_size for file in files_of(tmp_path))
    for file in files_of(tmp_path):
        file.unlink()
    settings = SHARE | {"kv_files": str(tmp_path), "kv_files_size": 20 * size}
    with engine(FAMILY, **settings) as llm:
        for name, seconds in (("leased", 600.0), ("over", 0.01), ("free", None)):
            prompt = {"prompt_token_ids": random_token_ids(70, seed=len(name))}
            llm.generate([prompt], greedy(20), name, retain_kv=seconds, use_tqdm=False)
        for seed in range(6):
            run(llm, [random_token_ids(70, seed=100 + seed)], greedy(4))
            llm._client.core.executor._worker._mover.flush()
            scheduler_of(llm).kv_cache.store.index.look()  # as it does every two seconds
        scheduler_of(llm).leases.end_all()  # in this process
    with engine(FAMILY, **settings) as llm:
        assert [llm.find_parent(name).leased for name in ("leased", "over", "free")] == [True, False, False]
        (lease,) = scheduler_of(llm).leases.moved()
        assert (lease.root_id, lease.place, lease.num_tokens) == ("leased", InheritedFrom.FILES, 90)
        found = {name: llm.generate_continuation(name, [1, 2], greedy(4)) for name in ("leased", "over")}
        assert found["leased"].num_cached_tokens == 80
        assert found["leased"].continuation.source == "files"
        assert found["over"].num_cached_tokens == 0
        llm.forget("leased")
        assert scheduler_of(llm).leases.moved() == []
    for file in files_of(tmp_path):
        file.unlink()
    with engine(FAMILY, **settings) as llm:
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], greedy(20), "lost", retain_kv=600.0, use_tqdm=False)
        scheduler_of(llm).leases.end_all()
    for file in files_of(tmp_path):
        file.unlink()
    with engine(FAMILY, **settings) as llm:
        assert not llm.find_parent("lost").leased


def test_damaged_files_are_computed_and_written_again(tmp_path, expected):
    settings = SHARE | {"kv_files": str(tmp_path)}
    with engine(FAMILY, **settings) as llm:
        answers(llm)
    draws, written = random.Random(3), files_of(tmp_path)
    for file in written:
        data = bytearray(file.read_bytes())
        data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
        file.write_bytes(data)
    with engine(FAMILY, **settings) as llm:
        assert answers(llm) == (expected, [0, 0, 0])
    assert files_of(tmp_path) == written
    with engine(FAMILY, **settings) as llm:
        assert answers(llm) == (expected, [64, 32, 80])


def test_engines_of_other_models_and_salts_do_not_read_them(tmp_path):
    settings = SHARE | {"kv_files": str(tmp_path)}
    with engine(FAMILY, **settings) as llm:
        run(llm, PROMPTS[:1], greedy(4))
    with engine(FAMILY, **settings, kv_cache_dtype="float16") as llm:
        assert run(llm, PROMPTS[:1], greedy(4))[0].num_cached_tokens == 0
    with engine(FAMILY, **settings) as llm:
        (other,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], greedy(4), cache_salt="other", use_tqdm=False)
        (same,) = run(llm, PROMPTS[:1], greedy(4))
        assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 64)


def test_engines_whose_weights_have_other_bits_do_not_read_them(tmp_path):
    settings = SHARE | {"kv_files": str(tmp_path), "kv_cache_dtype": "float16"}
    for quantization in ("int8", "int4", "none"):
        with engine(FAMILY, **settings, quantization=quantization) as llm:
            assert run(llm, PROMPTS[:1], greedy(4))[0].num_cached_tokens == 0
    with engine(FAMILY, **settings, quantization="int8") as llm:
        assert run(llm, PROMPTS[:1], greedy(4))[0].num_cached_tokens == 64


def test_a_load_that_takes_longer_than_computing_is_not_made_and_tried_again_later(tmp_path, expected):
    settings = SHARE | {"kv_files": str(tmp_path)}
    with engine(FAMILY, **settings) as llm:
        answers(llm)
    with engine(FAMILY, **settings) as llm:
        run(llm, [random_token_ids(length, seed=500 + length) for length in (70, 33, 90)], greedy(4))  # a pace is known
        store = scheduler_of(llm).kv_cache.store
        for _ in range(LEAST_OBSERVED):
            store.fetch_times.note(1, 1e6)
        assert answers(llm) == (expected, [0, 0, 0])
        assert store.fetch_times.estimate(1) < 1e6


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kv_connector": "memory"}, "kv_files: and kv_connector 'memory' both"),
        ({"preemption_mode": "recompute"}, "kv_files: .*pass through host memory"),
        ({"enable_prefix_caching": False}, "leave enable_prefix_caching on"),
        ({"kv_files_size": 0}, "kv_files_size"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, settings, problem):
    with pytest.raises(ConfigError, match=problem), engine(FAMILY, kv_files=str(tmp_path), **settings):
        pass
