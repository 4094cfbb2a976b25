"""Hidden states beside everything else that an engine does: no row is mixed up with another, generation gets the same
tokens and numbers as alone, and nothing that others hold is written.

What a request gets alone is the measure here, to the bit. That this is right, test_hidden_states.py says.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.api.llm import LLM
from ratoon.core.params import BeamSearchParams, PoolingParams, SamplingParams
from ratoon.core.request import EngineCoreRequest, InheritedFrom
from ratoon.layers.native_ops import native_ops_reasons
from tests.depths import both_depths
from tests.golden.engines import engine
from tests.golden.hidden_oracle import Answer, CoreDriver, all_layers, extraction_of, num_layers, oracle_states
from tests.golden.tiny_models import random_token_ids
from tests.unit.scheduling.reading import extractions_of

pytestmark = pytest.mark.skipif(
    bool(native_ops_reasons(torch.device("cpu"), torch.float32)), reason="torch's products depend on the batch"
)

LLAMA = "llama with grouped heads"
WIDE_WINDOW = "mistral with a window wider than a block"
TWO_GROUPS = "qwen2 with windows by layer type"
QWEN3 = "qwen3 untied with heads that the native kernels take"
FAMILIES = [LLAMA, WIDE_WINDOW, TWO_GROUPS, QWEN3, "gpt2"]
DTYPES = ["float32", "float16", "bfloat16"]
SHARED = random_token_ids(60, seed=99)

# Lengths around the borders of blocks, alone and with a common prefix.
TEXTS = [random_token_ids(length, seed=length) for length in (1, 2, 15, 16, 17, 33, 70)]
TEXTS += [[*SHARED[:length], length] for length in (59, 47, 32, 16)]


def params(seed: int, **changes: Any) -> SamplingParams:
    values = {"temperature": 1.0, "seed": seed, "max_tokens": 9, "ignore_eos": True, "logprobs": 1}
    return SamplingParams(**(values | changes))


def searching(prompt: list[int], width: int, **changes: Any) -> dict[str, Any]:
    beams = BeamSearchParams(beam_width=width, n=2, max_tokens=7, all_stop_token_ids=[], **changes)
    return {"prompt_token_ids": prompt, "params": beams}


# What else there is to do: the fields of requests, which get names as they come.
OTHERS: list[dict[str, Any]] = [
    {"prompt_token_ids": TEXTS[4], "params": params(0, temperature=0.0)},
    {"prompt_token_ids": TEXTS[6], "params": params(1)},
    {"prompt_token_ids": TEXTS[7], "params": params(2, n=3, top_p=0.9)},
    {"prompt_token_ids": TEXTS[9], "params": params(3, frequency_penalty=0.5, max_tokens=30)},
    {"prompt_token_ids": TEXTS[2], "params": params(4, max_tokens=40), "retain_kv": 60.0},
    {"prompt_token_ids": TEXTS[8], "params": params(5, n=2, max_tokens=20), "retain_kv": 60.0},
    searching(TEXTS[3], 3),
    searching(TEXTS[8], 4),
    *(
        {
            "prompt_token_ids": TEXTS[text],
            "params": PoolingParams(pooling=kind),
        }
        for text, kind in ((5, "mean"), (10, "last"))
    ),
]

Numbers = list[Any]


def num_choices_of(fields: dict[str, Any]) -> int:
    return EngineCoreRequest("", **fields).num_choices


def numbers_of(driver: CoreDriver, request_id: str, num_choices: int) -> Numbers:
    """All that a caller can see of a request that asks for no hidden states."""
    answers = [driver.answers[request_id, choice] for choice in range(num_choices)]
    assert [answer.error for answer in answers] == [None] * num_choices
    rows = [[(row.token_ids, row.logprobs, row.sampled_ranks) for row in answer.logprobs] for answer in answers]
    return [(answer.token_ids, answer.score, answer.pooled, row) for answer, row in zip(answers, rows, strict=True)]


@cache
def others_alone(family: str) -> list[Numbers]:
    found = []
    with engine(family) as llm:
        driver = CoreDriver(llm)
        for number, fields in enumerate(OTHERS):
            assert llm.reset_prefix_cache()
            driver.add(EngineCoreRequest(str(number), **fields))
            driver.run()
            found.append(numbers_of(driver, str(number), num_choices_of(fields)))
        llm.reset_prefix_cache()
    return found


@cache
def _states_alone(family: str, token_ids: tuple[int, ...]) -> np.ndarray:
    with engine(family) as llm:
        return CoreDriver(llm).extract("x", token_ids, range(len(token_ids)), all_layers(family)).states


def states_alone(family: str, token_ids: Sequence[int]) -> np.ndarray:
    """[L + 2, T, H]: all of them, in an engine that has nothing else to do and nothing cached."""
    return _states_alone(family, tuple(token_ids))


def rounded(states: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return torch.from_numpy(states).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return states.astype(dtype)


class Mix:
    """Extractions that are compared with what each gets alone, between requests of all other kinds."""

    def __init__(self, family: str, llm: LLM, seed: int) -> None:
        self.family = family
        self.driver = CoreDriver(llm)
        self.random = random.Random(seed)
        self.others: dict[str, int] = {}
        self.asked: dict[str, tuple[list[int], list[int], list[int], str]] = {}

    def add_other(self) -> None:
        number = self.random.randrange(len(OTHERS))
        name = f"other {len(self.others)}"
        self.others[name] = number
        self.driver.add(EngineCoreRequest(name, **OTHERS[number]))

    def add_extraction(self) -> None:
        """Of a text of its own, or of what another request has come to so far."""
        parents = [name for name in self.others if OTHERS[self.others[name]].get("pooling_params") is None]
        if parents and self.random.random() < 0.5:
            parent = self.random.choice(parents)
            fields = OTHERS[self.others[parent]]
            choice = self.random.randrange(num_choices_of(fields))
            sequence = [*fields["prompt_token_ids"], *self.driver.answers[parent, choice].token_ids]
            self.ask(sequence, parent if choice == 0 else f"{parent}#{choice}")
        else:
            self.ask(self.random.choice(TEXTS), None)

    def ask(self, sequence: list[int], parent: str | None) -> None:
        length, name = len(sequence), f"extraction {len(self.asked)}"
        kind = self.random.choice(["all", "last", "some", "some", "run"])
        if kind == "some":
            positions = sorted(self.random.sample(range(length), self.random.randint(1, min(length, 12))))
        else:
            first = {"all": 0, "last": length - 1, "run": self.random.randrange(length)}[kind]
            positions = list(range(first, length))
        layers = self.random.sample(all_layers(self.family), self.random.randint(1, num_layers(self.family) + 2))
        dtype = self.random.choice(DTYPES)
        self.asked[name] = (sequence, positions, layers, dtype)
        self.driver.add(extraction_of(name, sequence, positions, layers, parent, dtype=dtype))

    def check(self) -> None:
        for name, (sequence, positions, layers, dtype) in self.asked.items():
            expected = states_alone(self.family, sequence)[layers][:, positions]
            assert np.array_equal(self.driver[name].states, rounded(expected, dtype)), (name, positions, layers, dtype)
        alone = others_alone(self.family)
        for name, number in self.others.items():
            assert numbers_of(self.driver, name, num_choices_of(OTHERS[number])) == alone[number], name


# ---- mixed up? ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(2)
def test_forty_at_once_of_all_lengths_rows_layers_and_dtypes_each_get_their_own(family: str) -> None:
    """In a few steps, and in the order in which they came, which is none: the reported fault of other engines."""
    with engine(family, max_num_batched_tokens=4096, num_blocks=300) as llm:
        mix = Mix(family, llm, seed=1)
        for number in range(40):
            mix.ask(TEXTS[number * 7 % len(TEXTS)], None)
        for _ in range(3):  # one would do, if scattered rows did not take a span each
            mix.driver.step()
        assert not mix.driver.core.has_work()
        mix.check()
    for name, (sequence, positions, layers, dtype) in mix.asked.items():
        if dtype == "float32":
            expected = oracle_states(family, sequence)[layers][:, positions]
            np.testing.assert_allclose(mix.driver[name].states, expected, atol=1e-4, rtol=0)


# Other mixes in other engines for each family.
@pytest.mark.parametrize(("family", "seed"), [(FAMILIES[seed % len(FAMILIES)], seed) for seed in range(25)])
@pytest.mark.one_in(11)
def test_any_mix_in_any_engine_gives_everybody_what_he_gets_alone(family: str, seed: int) -> None:
    choose = random.Random(1000 + seed)
    changes = {
        "max_num_batched_tokens": choose.choice([7, 16, 33, 120, 1024]),
        "max_prefill_chunk": choose.choice([None, None, 5, 20]),
        "num_blocks": choose.choice([20, 28, 40, 96]),
        "max_num_seqs": choose.choice([8, 16, 32]),
        "enable_prefix_caching": choose.random() < 0.8,
        "max_steps_in_flight": 1 + seed % 3,
    }
    with engine(family, **changes) as llm:
        mix = Mix(family, llm, seed)
        for _ in range(60):
            for _ in range(choose.choice([0, 0, 1, 1, 2])):
                mix.add_extraction()
            if choose.random() < 0.3:
                mix.add_other()
            mix.driver.step()
        mix.driver.run()
        mix.check()
        llm.reset_prefix_cache()


@both_depths
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(7)
def test_generation_beside_extractions_is_generation_alone(family: str) -> None:
    """Every step reads something out; each of the requests twice, from different steps on."""
    with engine(family, max_num_batched_tokens=200) as llm:
        mix = Mix(family, llm, seed=3)
        numbers = list(range(len(OTHERS))) * 2
        while numbers or mix.driver.core.scheduler.state.running:
            if numbers:
                name = f"other {len(mix.others)}"
                mix.others[name] = numbers.pop()
                mix.driver.add(EngineCoreRequest(name, **OTHERS[mix.others[name]]))
            mix.add_extraction()
            mix.driver.step()
        mix.driver.run()
        mix.check()
        llm.reset_prefix_cache()


# ---- memory that is taken away ----


@both_depths
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("caching", [True, False], ids=["with a prefix cache", "without"])
@pytest.mark.one_in(3)
def test_an_extraction_that_loses_its_memory_to_generation_ends_with_the_same_bits(
    family: str, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TEXTS[6]
    num_blocks = {TWO_GROUPS: 14, WIDE_WINDOW: 8}.get(family, 8)
    with engine(family, num_blocks=num_blocks, enable_prefix_caching=caching, max_prefill_chunk=8) as llm:
        driver = CoreDriver(llm)
        num_preempted: Counter[str] = Counter()
        extractions = extractions_of(driver.core.scheduler)
        requeue = extractions.requeue
        monkeypatch.setattr(
            extractions,
            "requeue",
            lambda state: (num_preempted.update([state.branch.branch_id]), requeue(state))[1],
        )
        for number in (3, 4):
            driver.add(EngineCoreRequest(f"other {number}", **(OTHERS[number] | {"retain_kv": None})))
        for number in range(3):
            driver.add(extraction_of(f"x{number}", text, range(len(text)), all_layers(family)))
            driver.step()
        driver.run()
        assert num_preempted.total() > 0
        for number in range(3):
            assert np.array_equal(driver[f"x{number}"].states, states_alone(family, text))
        for number in (3, 4):
            assert numbers_of(driver, f"other {number}", 1) == others_alone(family)[number]


# ---- nothing that others hold is written ----


class Watch:
    """Which blocks of the KV cache change."""

    def __init__(self, driver: CoreDriver) -> None:
        caches = driver.core.executor._worker.runner.kv.of_layer
        self.tensors = {layer: tensor for layer, (tensor,) in caches.items()}
        self.before = {layer: tensor.clone() for layer, tensor in self.tensors.items()}

    def changed(self) -> set[int]:
        found: set[int] = set()
        for layer, tensor in self.tensors.items():
            same = (tensor == self.before[layer]).flatten(start_dim=1).all(dim=1)  # [blocks]
            found.update((~same).nonzero().flatten().tolist())
        return found


def leased_blocks(driver: CoreDriver, branch_id: str) -> set[int]:
    return {block.block_id for table in driver.core.scheduler.leases.find(branch_id).block_tables for block in table}


def leased_parent(driver: CoreDriver) -> list[int]:
    return driver.generate("g", TEXTS[7], 20, retain_kv=60.0)


@pytest.mark.parametrize("family", [LLAMA, QWEN3, "gpt2"])
def test_rows_that_are_there_are_read_without_a_write(family: str) -> None:
    with engine(family) as llm:
        driver = CoreDriver(llm)
        sequence = leased_parent(driver)
        watch = Watch(driver)
        for name, positions in {"run": range(79), "some": [0, 15, 16, 40, 78]}.items():
            answer = driver.extract(name, sequence, positions, all_layers(family), "g")
            assert np.array_equal(answer.states, states_alone(family, sequence)[:, list(positions)])
        assert watch.changed() <= {0}  # the null block, which is never read
        # Written anew they would have the same bits. Where they are wrong, they stay wrong.
        for tensor in watch.tensors.values():
            tensor[sorted(leased_blocks(driver, "g"))] *= 0.5
        watch = Watch(driver)
        driver.extract("again", sequence, [0, 15, 16, 40, 78], all_layers(family), "g")
        assert watch.changed() <= {0}
        llm.reset_prefix_cache()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parent", ["g", None], ids=["named", "found in the cache"])
@pytest.mark.one_in(2)
def test_whatever_is_read_no_block_of_a_leased_parent_changes(family: str, parent: str | None) -> None:
    with engine(family) as llm:
        driver = CoreDriver(llm)
        sequence = leased_parent(driver)
        watch = Watch(driver)
        for name, positions in {"last": [79], "some": [0, 15, 16, 40, 79], "all": range(80)}.items():
            driver.extract(name, sequence, positions, [1], parent)
            assert not watch.changed() & (leased_blocks(driver, "g") - {0}), name
        again = driver.extract("again", sequence, range(80), all_layers(family), "g")
        assert np.array_equal(again.states, states_alone(family, sequence))
        llm.reset_prefix_cache()


@pytest.mark.parametrize("family", [LLAMA, QWEN3, "gpt2"])
def test_the_last_token_is_written_into_a_copy_of_one_block(family: str) -> None:
    with engine(family) as llm:
        driver = CoreDriver(llm)
        sequence = driver.generate("g", TEXTS[6], 5, retain_kv=60.0)
        watch = Watch(driver)
        driver.add(extraction_of("last", sequence, [74], [1], "g"))
        driver.core.step()  # and the freed block is not overwritten yet
        assert len(watch.changed() - {0}) == 1
        assert not watch.changed() & leased_blocks(driver, "g")
        llm.reset_prefix_cache()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(2)
def test_a_running_parent_goes_on_in_blocks_that_nobody_else_writes(family: str) -> None:
    fields = OTHERS[4]
    with engine(family, max_steps_in_flight=1) as llm:  # so that it is known what each step may write
        driver = CoreDriver(llm)
        driver.add(EngineCoreRequest("g", **fields))
        asked = {}
        for number in range(41):
            if number % 3 == 2:
                sequence = [*fields["prompt_token_ids"], *driver["g"].token_ids]
                asked[f"x{number}"] = sequence
                driver.add(extraction_of(f"x{number}", sequence, [3, len(sequence) - 1], [1, 3], "g"))
            before = full_blocks(driver, "g")
            watch = Watch(driver)
            driver.step()
            assert not watch.changed() & before
        driver.run()
        assert numbers_of(driver, "g", 1) == others_alone(family)[4]
        for name, sequence in asked.items():
            expected = states_alone(family, sequence)[[1, 3]][:, [3, len(sequence) - 1]]
            assert np.array_equal(driver[name].states, expected), name
        assert sources(driver, asked) >= {InheritedFrom.LEASE}
        llm.reset_prefix_cache()


def full_blocks(driver: CoreDriver, branch_id: str) -> set[int]:
    """Those of a running branch that it has filled and still reads."""
    branch = driver.core.scheduler.state.branches.get(branch_id)
    if branch is None:
        return set()
    num_full = branch.num_computed_tokens // 16
    window_start = max(0, num_full - 1)  # a block of a window may be given back in the next step, and used anew
    first = window_start if driver.core.scheduler.kv_cache.gives_blocks_back else 0
    return {block.block_id for table in branch.block_tables for block in table[first:num_full]} - {0}


def sources(driver: CoreDriver, names: Sequence[str] | dict[str, Any]) -> set[InheritedFrom | None]:
    answers: list[Answer] = [driver[name] for name in names]
    return {answer.inherited_from for answer in answers}
