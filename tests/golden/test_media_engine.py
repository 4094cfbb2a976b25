"""Engines whose prompts have pictures. The encoder of these tests makes of each pixel the embedding of the token with
that number, so that a prompt with a picture must give, to the bit, what the text with these tokens gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch

from ratoon import LLM, RequestError
from ratoon.core.media import EMBEDS, IMAGE, MediaFeature, MediaInput
from ratoon.core.params import BeamSearchParams, HiddenStatesParams
from ratoon.core.request import EngineCoreRequest
from ratoon.core.wire import WireTensor
from tests.depths import both_depths
from tests.golden.driver import Driver, greedy, sampled
from tests.golden.engines import engine, scheduler_of, tiny_model
from tests.golden.tiny_models import random_token_ids

FAMILIES = [
    "llama with grouped heads",
    "mistral with a window shorter than the sequence",
    "gpt2",
]
LLAMA = FAMILIES[0]
PAD = 0  # the placeholder
CAT, DOG = random_token_ids(13, seed=5), random_token_ids(6, seed=6)
BEFORE, AFTER = random_token_ids(5, seed=7), random_token_ids(4, seed=8)


class TableEncoder:
    """Implements what a model's `media_encoder` has."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self.num_inputs = 0
        self.broken = b""  # pixels that raise

    def encode(self, inputs: Sequence[MediaInput], attend: Any) -> list[torch.Tensor]:
        self.num_inputs += len(inputs)
        pixels = [np.frombuffer(media.features.data, np.uint8) for media in inputs]
        if any(one.tobytes() == self.broken for one in pixels):
            raise ValueError("a broken picture")
        return [self._table[torch.from_numpy(one.astype(np.int64))] for one in pixels]


class Picture(list[int]):
    """A picture in a prompt: its pixels."""


class Words(list[int]):
    """Rows of embeddings that a caller brings: those of these tokens."""


@contextmanager
def seeing_engine(family: str = LLAMA, **settings: Any) -> Iterator[tuple[Driver, TableEncoder]]:
    with engine(family, **({"block_size": 4, "num_blocks": 200} | settings)) as llm:
        encoder = TableEncoder(table_of(family))
        runner_of(llm).model.media_encoder = encoder
        yield Driver(llm), encoder


def runner_of(llm: LLM) -> Any:
    return llm._client.core.executor._worker.runner


def table_of(family: str) -> torch.Tensor:
    return tiny_model(family).oracle.get_input_embeddings().weight.detach()


def text_of(parts: Sequence[list[int]]) -> list[int]:
    return [token for part in parts for token in part]


def request_of(driver: Driver, params: Any, parts: Sequence[list[int]], family: str = LLAMA, **rest: Any) -> Any:
    """A request for a prompt of text and pictures."""
    tokens: list[int] = []
    features: list[MediaFeature] = []
    for part in parts:
        if isinstance(part, (Picture, Words)):
            pixels = WireTensor("uint8", (len(part),), bytes(part))
            data = MediaInput(IMAGE, len(part), pixels)
            if isinstance(part, Words):
                rows = table_of(family)[torch.tensor(part)].contiguous().numpy()
                data = MediaInput(EMBEDS, len(part), WireTensor("float32", rows.shape, rows.tobytes()))
            name = blake2b(bytes(data.features.data)).hexdigest()
            features.append(MediaFeature(len(tokens), len(part), name, data))
            tokens += [PAD] * len(part)
        else:
            tokens += part
    request = driver.llm.engine.input_processor.process(driver.new_id(), tokens, params, **rest)
    request.mm_features = features
    return request


def ask(driver: Driver, params: Any, *parts: list[int], **rest: Any) -> str:
    return driver.submit(request_of(driver, params, parts, **rest))


def tokens_of(driver: Driver, request_id: str, choice: int = 0) -> list[int]:
    return list(driver.result(request_id).outputs[choice].token_ids)


@both_depths
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [3, 7, 64])
@pytest.mark.one_in(5)
def test_a_prompt_with_pictures_gives_the_tokens_of_the_text_however_it_is_cut(family: str, budget: int) -> None:
    prompts = [
        [BEFORE, Picture(CAT), AFTER],
        [Picture(DOG), BEFORE, Picture(CAT)],
        [BEFORE, Picture(DOG), Picture(CAT), Picture(DOG), AFTER],
        [Words(CAT)],
    ]
    params = sampled(6, logprobs=2)
    with seeing_engine(family, block_size=16, max_num_batched_tokens=budget) as (driver, encoder):
        ids = [ask(driver, params, *parts, family=family) for parts in prompts]
        found = [driver.result(name) for name in ids]
        assert encoder.num_inputs == runner_of(driver.llm).media.num_runs == 2, "two pictures, each once"
        texts = [driver.result(driver.add(text_of(parts), params)) for parts in prompts]
        for output, text in zip(found, texts, strict=True):
            assert output.outputs[0].token_ids == text.outputs[0].token_ids
            assert output.outputs[0].logprobs == text.outputs[0].logprobs


def test_thirty_two_requests_over_one_picture_run_the_encoder_once() -> None:
    with seeing_engine(num_blocks=600, max_num_batched_tokens=100) as (driver, encoder):
        ids = [ask(driver, greedy(3), [number + 1, 2], Picture(CAT), AFTER) for number in range(32)]
        found = [tokens_of(driver, name) for name in ids]
        assert encoder.num_inputs == 1
        assert found == [driver.afresh([number + 1, 2, *CAT, *AFTER], greedy(3)) for number in range(32)]


def test_a_picture_is_found_in_the_prefix_cache_and_another_one_is_not() -> None:
    with seeing_engine(encoder_cache_size=13) as (driver, encoder):
        first = tokens_of(driver, ask(driver, greedy(4), BEFORE, Picture(CAT), AFTER))
        tokens_of(driver, ask(driver, greedy(2), Picture(DOG)))  # in whose place the rows of the first were
        again = driver.result(ask(driver, greedy(4), BEFORE, Picture(CAT), AFTER))
        assert again.num_cached_tokens == 20 and list(again.outputs[0].token_ids) == first
        assert encoder.num_inputs == 2
        other = driver.result(ask(driver, greedy(4), BEFORE, Picture(CAT[::-1]), AFTER))
        assert other.num_cached_tokens == 4 and encoder.num_inputs == 3
        assert list(other.outputs[0].token_ids) == driver.afresh([*BEFORE, *CAT[::-1], *AFTER], greedy(4))


def test_choices_beams_and_speculation_behind_a_picture() -> None:
    parts = [BEFORE, Picture(CAT), AFTER]
    with seeing_engine(speculate="ngram") as (driver, encoder):
        several, search = sampled(5, n=3), BeamSearchParams(beam_width=3, n=2, max_tokens=5, ignore_eos=True)
        for params in (several, search):
            found, text = driver.result(ask(driver, params, *parts)), driver.result(driver.add(text_of(parts), params))
            assert [one.token_ids for one in found.outputs] == [one.token_ids for one in text.outputs]
        assert encoder.num_inputs == 1


@both_depths
@pytest.mark.parametrize("retain_kv", [None, 60.0])
def test_continuations_have_the_pictures_of_their_root_from_any_place(retain_kv: float | None) -> None:
    params = greedy(4)
    with seeing_engine(max_num_batched_tokens=16) as (driver, encoder):
        parent = ask(driver, params, BEFORE, Picture(CAT), AFTER, retain_kv=retain_kv)
        whole = [*BEFORE, *CAT, *AFTER, *tokens_of(driver, parent)]
        for at in (None, 3, 9, 18, 22, 24):
            child = driver.generate_continuation(parent, [7, 8], params, at=at)
            found = tokens_of(driver, child)
            grandchild = tokens_of(driver, driver.generate_continuation(child, [9], params))
            assert encoder.num_inputs == 1
            text = [*whole[:at], 7, 8]
            assert found == driver.afresh(text, params)
            assert grandchild == driver.afresh([*text, *found, 9], params)
        driver.forget_unheld_memory()


def test_a_continuation_in_an_engine_that_has_forgotten_all_runs_the_encoder_again() -> None:
    with seeing_engine() as (driver, encoder):
        parent = ask(driver, greedy(4), BEFORE, Picture(CAT), AFTER)
        tokens = tokens_of(driver, parent)
        assert driver.llm.reset_prefix_cache()
        child = driver.generate_continuation(parent, [7, 8], greedy(4), at=12)
        assert tokens_of(driver, child) == driver.afresh([*BEFORE, *CAT[:7], 7, 8], greedy(4))
        assert encoder.num_inputs == 2 and len(tokens) == 4


@pytest.mark.parametrize("swap_memory", [0, "1MiB"])
def test_prompts_with_pictures_that_were_preempted_go_on_where_they_were(swap_memory: Any) -> None:
    prompts = [[[number + 1], Picture(CAT), BEFORE, Picture(DOG), AFTER] for number in range(4)]
    settings = {"num_blocks": 26, "max_num_batched_tokens": 9, "encoder_cache_size": 13, "swap_memory": swap_memory}
    with seeing_engine(enable_prefix_caching=False, **settings) as (driver, encoder):
        ids = [ask(driver, greedy(14), *parts) for parts in prompts]
        found = [tokens_of(driver, name) for name in ids]
        assert scheduler_of(driver.llm).stats().num_preemptions > 0
        assert found == [driver.afresh(text_of(parts), greedy(14)) for parts in prompts]
        assert encoder.num_inputs > 2, "there is room for one of them at a time"


@pytest.mark.parametrize("positions", [[0, 6, 11, 20], [[0, None]], [9], [-1]])
def test_hidden_states_of_pictures(positions: Any) -> None:
    """With a text, and of a text that has ended."""
    states = HiddenStatesParams(positions=positions, layers=[0, 1, -1])
    parts = [BEFORE, Picture(CAT), AFTER]
    with seeing_engine(block_size=16, max_num_batched_tokens=16) as (driver, _):
        params = greedy(3, return_hidden_states=states)
        read = driver.result(ask(driver, params, *parts))
        text = driver.result(driver.add(text_of(parts), params))
        assert np.array_equal(read.hidden_states[0].tensor, text.hidden_states[0].tensor)
        driver.llm.reset_prefix_cache()
        later, of_text = driver.llm.extract_hidden_states([read, text], states, progress=False)
        assert np.array_equal(later.tensor, of_text.tensor)
        assert np.array_equal(later.tensor, read.hidden_states[0].tensor)


def test_a_broken_picture_fails_its_request_alone() -> None:
    with seeing_engine() as (driver, encoder):
        encoder.broken = bytes(DOG)
        ids = {}
        for name, parts in (("good", [BEFORE, Picture(CAT)]), ("bad", [Picture(DOG), AFTER]), ("text", [AFTER])):
            request: EngineCoreRequest = request_of(driver, greedy(4), parts)
            ids[driver.submit(request)] = name
        found = {}
        while len(found) < 3:
            for output in driver.llm.engine.step():
                if output.finished:
                    found[ids[output.request_id]] = output
        assert "a broken picture" in found["bad"].error
        assert found["good"].error is None and found["text"].error is None
        encoder.broken = b""
        assert list(found["good"].outputs[0].token_ids) == driver.afresh([*BEFORE, *CAT], greedy(4))
        fixed = tokens_of(driver, ask(driver, greedy(4), Picture(DOG), AFTER))
        assert fixed == driver.afresh([*DOG, *AFTER], greedy(4))


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_runs_the_encoder_again(level: int) -> None:
    with seeing_engine() as (driver, encoder):
        first = tokens_of(driver, ask(driver, greedy(4), BEFORE, Picture(CAT)))
        assert len(runner_of(driver.llm).embeddings) == 1
        driver.llm.sleep(level)
        assert len(runner_of(driver.llm).embeddings) == 0
        driver.llm.wake_up()
        runner_of(driver.llm).model.media_encoder = encoder
        assert tokens_of(driver, ask(driver, greedy(4), BEFORE, Picture(CAT))) == first
        assert encoder.num_inputs == 2


def test_a_picture_for_a_model_without_an_encoder_fails_its_request() -> None:
    with engine(LLAMA) as llm:
        driver = Driver(llm)
        request = request_of(driver, greedy(2), [BEFORE, Picture(CAT)])
        driver.submit(request)
        outputs = []
        while not any(output.finished for output in outputs):
            outputs = llm.engine.step()
        assert "no encoder" in outputs[0].error


@pytest.mark.parametrize("ranks", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=["stages", "ranks"])
def test_workers_in_processes_read_rows_that_a_request_brought(ranks: dict[str, int]) -> None:
    """Of a pipeline, only the first stage reads them."""
    parts = [BEFORE, Words(CAT), AFTER]
    with engine(LLAMA, max_num_batched_tokens=12) as llm:
        expected = Driver(llm).afresh(text_of(parts), greedy(4))
    with engine(LLAMA, max_num_batched_tokens=12, **ranks) as llm:
        names = [Driver(llm).submit(request_of(Driver(llm), greedy(4), parts))]
        found = {}
        while len(found) < len(names):
            found |= {output.request_id: output for output in llm.engine.step() if output.finished}
        assert [list(output.outputs[0].token_ids) for output in found.values()] == [expected]


def test_a_picture_with_more_rows_than_are_kept_is_refused() -> None:
    with seeing_engine(encoder_cache_size=5) as (driver, _), pytest.raises(RequestError, match="encoder_cache_size"):
        ask(driver, greedy(2), Picture(DOG))
