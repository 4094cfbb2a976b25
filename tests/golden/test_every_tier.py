"""One set of requests of every kind, over each place where keys and values can be: the device alone, host memory, files
that are new, files of an earlier engine, and engines that compute prompts apart from answers. All give the same tokens
and the same numbers, to the bit, and so do drafts beside them.

Every set is asked twice, with other texts in between that take the device's blocks: the second time, prefixes come from
the tier that is tested.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ratoon import LLM, BeamSearchParams, HiddenStatesParams, RequestOutput, SamplingParams
from ratoon.memory.block_store import BlockStore
from tests.adapter_folders import write_adapter
from tests.golden.image_readers import ImageReader, image_reader, picture
from tests.golden.test_images_compose import shapes_of_text
from tests.golden.test_prefill_decode import figures_of
from tests.golden.tiny_models import random_token_ids

QWEN, GEMMA = "qwen2_5_vl", "gemma3"  # rope on three axes; two kinds of KV memory
COMMON: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "dtype": "float32", "max_num_seqs": 8, "enable_lora": True, "max_lora_rank": 8,
    "max_num_batched_tokens": 64,
}  # fmt: skip
FEW = {"num_blocks": 30}  # less than the set needs, more than its largest request
SPLIT = {"prefill_engines": 1, "decode_engines": 2, "prefill_threshold": 1, "swap_memory": "4MiB"}
DRAFTS = {"speculate": "ngram", "speculate_ngram_min": 1, "speculate_min_acceptance": 0.0, "speculate_max_seqs": 32}
FIRST_SPECIAL = 90  # the tokens from here on are those around pictures
NUM_TURNS = 3

Found = dict[str, Any]


def random_text(length: int, seed: int) -> list[int]:
    return [token % FIRST_SPECIAL for token in random_token_ids(length, seed)]


TEXTS = [random_text(length, seed=length) for length in (100, 67, 90)]


def greedy(count: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **changes)


def numbers_of(outputs: list[RequestOutput]) -> list[Any]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [(list(one.token_ids), one.cumulative_logprob, one.logprobs) for output in outputs for one in output.outputs]


def ask(llm: LLM, reader: ImageReader, adapter: Path) -> Found:
    """The answers to requests of every kind, by name."""
    found: Found = {}

    def note(name: str, *outputs: RequestOutput) -> None:
        found[name] = numbers_of(list(outputs))

    wide = BeamSearchParams(beam_width=3, n=3, max_tokens=6, ignore_eos=True)
    states = HiddenStatesParams(positions="all", layers=[0, -1])
    texts = [{"prompt_token_ids": text} for text in TEXTS]
    pictures = [reader.prompt(number, "who is in " * 6, "abcabcabc") for number in range(2)]
    note("greedy", *llm.generate(texts, greedy(16, logprobs=2), progress=False))
    note("drawn", *llm.generate(texts, SamplingParams(n=2, seed=3, max_tokens=8, ignore_eos=True), progress=False))
    note("beams", *llm.beam_search(texts[:2], wide, progress=False))
    note("pictures", *llm.generate(pictures, greedy(12, logprobs=2), progress=False))
    note("beams over a picture", *llm.beam_search(pictures[0], wide, progress=False))
    note("with an adapter", *llm.generate([texts[0], pictures[1]], greedy(8), adapter=str(adapter), progress=False))
    note("prompt logprobs", *llm.generate(texts[1], greedy(3, prompt_logprobs=0), progress=False))

    (root,) = llm.generate(texts[0], greedy(9), retain_kv=60, progress=False)
    child = llm.generate_continuation(root, [7, 8], greedy(6))
    note("continued", root, child, llm.generate_continuation(child, [9], wide))
    note("continued inside", llm.generate_continuation(root, [5], greedy(4), at=21))
    found["states of a request"] = np.asarray(llm.extract_hidden_states(child, states).tensor).tolist()
    found["states of a prompt"] = np.asarray(llm.extract_hidden_states(texts[2], states).tensor).tolist()
    (adapted,) = llm.generate(texts[1], greedy(6), adapter=str(adapter), progress=False)
    note("continued with an adapter", llm.generate_continuation(adapted, [3, 4], greedy(6)))

    (seen,) = llm.generate(pictures[0], greedy(6), progress=False)
    more = llm.generate_continuation(seen, reader.prompt(1, "and", "here"), greedy(6))
    note("a picture behind a picture", seen, more)
    found["states over pictures"] = np.asarray(llm.extract_hidden_states(more, states).tensor).tolist()
    for one in (root, child, adapted, seen, more):
        llm.forget(one.request_id)
    matching = SamplingParams(seed=2, max_tokens=40, structured_output={"regex": "(a cat|a dog), [0-9]{4}"})
    note("structured", *llm.generate(pictures[1], matching, progress=False))
    found["turns"] = talk(llm, reader)
    return found


def talk(llm: LLM, reader: ImageReader) -> list[Any]:
    """The turns of two sessions. Each turn repeats the text before it and brings a picture."""
    texts, turns, shown = ["who is in ", "what is on "], [], 0
    images: list[list[Any]] = [[], []]
    for turn in range(NUM_TURNS):
        for number in range(2):
            texts[number] += f"{reader.prompt()['prompt'][1:]} then {turn}"
            images[number].append(picture((turn + number) % 3))
            prompt = {"prompt": texts[number], "multi_modal_data": {"image": images[number]}}
            (output,) = llm.generate(prompt, greedy(6), session=f"s{number}", progress=False)
            turns += numbers_of([output])
            shown += len(output.prompt_token_ids or ())
    return [shown, *turns]


def evict(llm: LLM) -> None:
    """Other texts take the blocks of the device."""
    for seed in range(6):
        llm.generate({"prompt_token_ids": random_text(120, seed=900 + seed)}, greedy(2), progress=False)


@contextmanager
def served(family: str, **settings: Any) -> Iterator[LLM]:
    with LLM(str(image_reader(family).folder), **(COMMON | FEW | settings)) as llm:
        yield llm


@functools.cache
def adapter_of(family: str, folder: Path) -> Path:
    return write_adapter(folder / f"adapter-{family}", shapes_of_text(image_reader(family)), seed=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers")


@functools.cache
def right_answers(family: str, adapter: Path) -> Found:
    """With a large device, nothing else, and no drafts."""
    with served(family, num_blocks=600) as llm:
        found = ask(llm, image_reader(family), adapter)
    assert found["with an adapter"][0][0][:8] != found["greedy"][0][0][:8]
    assert found["pictures"][0] != found["pictures"][1]
    return found


def check(llm: LLM, family: str, adapter: Path, rounds: int = 2) -> None:
    right = right_answers(family, adapter)
    for number in range(rounds):
        found = ask(llm, image_reader(family), adapter)
        assert found.keys() == right.keys()
        for name, value in right.items():
            assert found[name] == value, f"{name}, round {number}"
        evict(llm)


@pytest.fixture(autouse=True)
def loads_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prefix that is found is loaded, though these models compute faster than a disk reads."""
    monkeypatch.setattr(BlockStore, "is_worth_loading", lambda *arguments: True)


engines = pytest.mark.parametrize(
    ("family", "drafts"),
    [(QWEN, {}), (QWEN, DRAFTS), pytest.param(GEMMA, DRAFTS, marks=pytest.mark.slow)],
    ids=["plain", "drafts", "two kinds of memory"],
)


@engines
@pytest.mark.one_in(2)
def test_the_device_alone_and_host_memory(family: str, drafts: dict[str, Any], folder: Path) -> None:
    adapter = adapter_of(family, folder)
    with served(family, **drafts) as llm:
        check(llm, family, adapter, rounds=1)
    with served(family, **drafts, swap_memory="4MiB") as llm:
        check(llm, family, adapter)
        stats = llm.stats()
        assert stats.store.loaded > 20
        assert not drafts or stats.drafts["ngram"].accepted_tokens > 0


@engines
@pytest.mark.one_in(2)
def test_new_files_and_files_of_an_earlier_engine(family: str, drafts: dict[str, Any], folder: Path, tmp_path) -> None:
    adapter, files = adapter_of(family, folder), {"kv_files": str(tmp_path), "swap_memory": "64KiB"}
    loaded = []
    for rounds in (2, 1):
        with served(family, **drafts, **files) as llm:
            check(llm, family, adapter, rounds)
            loaded.append(llm.stats().store.loaded)
    assert min(loaded) > 20


@engines
@pytest.mark.one_in(3)
def test_prompts_that_are_computed_apart(family: str, drafts: dict[str, Any], folder: Path) -> None:
    adapter = adapter_of(family, folder)
    with served(family, **drafts, **SPLIT) as llm:
        check(llm, family, adapter, rounds=1)
        stores = figures_of(llm)
        assert stores[0]["stored"] > 20 and any(store["loaded"] for store in stores[1:])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers in processes need Linux")
def test_files_of_two_ranks(folder: Path, tmp_path) -> None:
    """Sums of two ranks have an order of their own: numbers are compared with those of two ranks without files."""
    adapter, ranks = adapter_of(QWEN, folder), {"tensor_parallel_size": 2}
    with served(QWEN, **ranks, num_blocks=600) as llm:
        right = ask(llm, image_reader(QWEN), adapter)
    for _ in range(2):
        with served(QWEN, **ranks, kv_files=str(tmp_path), swap_memory="64KiB") as llm:
            found = ask(llm, image_reader(QWEN), adapter)
            assert found == right
            loaded = llm.stats().store.loaded
    assert loaded > 20
