"""Hidden states of both sides of an encoder-decoder model, and of an encoder alone, are those of transformers. They are
read beside generation, which does not change by a bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.core.params import PoolingParams
from ratoon.core.request import EngineCoreRequest, Extraction, FinishReason
from tests.depths import both_depths
from tests.golden.encoder_engines import (
    FAMILIES,
    START,
    TOLERANCE,
    Driver,
    Source,
    assert_greedy,
    beams,
    core_of,
    decoder_prompt,
    greedy,
    sampled,
    source_of,
    tiny_model,
)
from tests.golden.hidden_oracle import extraction_of
from tests.golden.marks import exact_on_cpu
from tests.golden.test_encoder_models import by_transformers
from tests.golden.tiny_encoder_models import tiny_bert
from tests.golden.tiny_models import MAX_POSITION, TinyModel, random_token_ids

ENCODER_LENGTHS = [1, 16, 17, 60, MAX_POSITION]
DECODER_LENGTHS = [40, 1, 17, 100, 5]
LEASE = {"retain_kv": 60.0}


@cache
def oracle_states(family: str, source: Source, prompt: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of the encoder and of the decoder, [L + 2, T, H] each. Not to be written to: they are kept."""
    of_encoder, of_decoder, _ = by_transformers(tiny_model(family), source.for_oracle()[0], list(prompt))
    return of_encoder.numpy(), of_decoder.numpy()


def all_layers(family: str, of_encoder: bool = False) -> list[int]:
    config = tiny_model(family).config
    assert config.encoder is not None
    return list(range((config.encoder.num_layers if of_encoder else config.num_layers) + 2))


def ask_states(
    driver: Driver, request_id: str, source: Source, prompt: list[int], positions: Sequence[int], layers: list[int],
    parent: str | None = None, **rest: Any,
) -> None:  # fmt: skip
    """Of the decoder, as the front end would send it."""
    request = extraction_of(request_id, prompt, positions, layers, parent, **rest)
    request.encoder_input = source.for_engine()
    driver.add(request)


def ask_encoder_states(
    driver: Driver, request_id: str, source: Source, positions: Sequence[int], layers: list[int], **rest: Any
) -> None:
    extraction = Extraction(list(positions), layers, of_encoder=True)
    driver.add(EngineCoreRequest(request_id, [START], extraction, encoder_input=source.for_engine(), **rest))


def assert_close(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE, err_msg=what)


# ---- against transformers ----


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_and_position_of_both_sides_in_one_batch(family: str) -> None:
    asked = [
        (source_of(family, encoder_length), decoder_prompt(decoder_length))
        for encoder_length, decoder_length in zip(ENCODER_LENGTHS, DECODER_LENGTHS, strict=True)
    ]
    with core_of(family, max_num_batched_tokens=200) as driver:
        for number, (source, prompt) in enumerate(asked):
            positions = range(source.num_positions)
            ask_encoder_states(driver, f"encoder {number}", source, positions, all_layers(family, of_encoder=True))
            ask_states(driver, f"decoder {number}", source, prompt, range(len(prompt)), all_layers(family))
        driver.run()
        for number, (source, prompt) in enumerate(asked):
            of_encoder, of_decoder = oracle_states(family, source, tuple(prompt))
            assert_close(driver[f"encoder {number}"].states, of_encoder, f"encoder {number}")
            assert_close(driver[f"decoder {number}"].states, of_decoder, f"decoder {number}")
        # Once for what was read out, and once for what the decoders read: states are kept nowhere.
        assert driver.num_encoder_runs == 2 * len(asked)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_some_positions_and_layers_in_the_order_asked_for(family: str) -> None:
    source, prompt = source_of(family, 60), decoder_prompt(40)
    last = tiny_model(family).config.num_layers
    with core_of(family, max_num_batched_tokens=7) as driver:
        ask_encoder_states(driver, "encoder", source, [0, 17, 58], [3, 0, 1, 3])
        ask_states(driver, "decoder", source, prompt, [0, 16, 39], [last + 1, 0, last])
        driver.run()
        of_encoder, of_decoder = oracle_states(family, source, tuple(prompt))
        assert_close(driver["encoder"].states, of_encoder[[3, 0, 1, 3]][:, [0, 17, 58]], "encoder")
        assert_close(driver["decoder"].states, of_decoder[[last + 1, 0, last]][:, [0, 16, 39]], "decoder")
        assert driver["encoder"].num_rows_run == 60


def test_states_of_a_finished_request_cost_a_row_each_and_no_encoder_run() -> None:
    family, source, prompt = "bart", source_of("bart", 50), decoder_prompt(20)
    with core_of(family) as driver:
        driver.ask("g", source, prompt, greedy(20), **LEASE)
        driver.run()
        sequence = [*prompt, *driver.tokens("g")]
        _, expected = oracle_states(family, source, tuple(sequence))
        for positions in ([39], [38], [0, 5, 19, 20, 38]):
            before = driver.num_computed_tokens
            ask_states(driver, "x", source, sequence, positions, all_layers(family), "g")
            driver.run()
            assert driver.num_computed_tokens - before == len(positions) == driver["x"].num_rows_run
            assert_close(driver["x"].states, expected[:, positions], str(positions))
        assert driver.num_encoder_runs == 1


def test_states_of_choices_and_beams_of_a_finished_request() -> None:
    family, source, prompt = "t5", source_of("t5", 33), decoder_prompt(15)
    with core_of(family) as driver:
        driver.ask("choices", source, prompt, sampled(7, n=2), **LEASE)
        driver.ask("beams", source, prompt, beams(4, n=2, max_tokens=7), **LEASE)
        driver.run()
        parents = {"choices": 0, "choices#1": 1, "beams": 0, "beams#1": 1}
        sequences = {}
        for parent, choice in parents.items():
            sequences[parent] = [*prompt, *driver.tokens(parent.partition("#")[0], choice)]
            ask_states(driver, f"x {parent}", source, sequences[parent], [3, 21], all_layers(family), parent)
        assert len(set(map(tuple, sequences.values()))) == 4
        driver.run()
        assert driver.num_encoder_runs == 1
        for parent, sequence in sequences.items():
            _, expected = oracle_states(family, source, tuple(sequence))
            assert_close(driver[f"x {parent}"].states, expected[:, [3, 21]], parent)
            assert driver[f"x {parent}"].num_rows_run == 2


def test_states_of_a_decoder_prompt_are_those_behind_its_own_encoder_input() -> None:
    family, prompt = "bart", decoder_prompt(40)
    sources = [source_of(family, 50, seed) for seed in range(3)]
    with core_of(family) as driver:
        for number, source in enumerate(sources * 2):
            ask_states(driver, str(number), source, prompt, range(40), all_layers(family))
            driver.run()
            assert_close(driver[str(number)].states, oracle_states(family, source, tuple(prompt))[1], str(number))
        assert driver.num_encoder_runs == 3


# ---- beside generation ----


@both_depths
@exact_on_cpu
@pytest.mark.parametrize("family", ["bart", "whisper"])
@pytest.mark.parametrize("swap_blocks", [0, 40])
@pytest.mark.one_in(3)
def test_generation_beside_extractions_does_not_change_by_a_bit(family: str, swap_blocks: int) -> None:
    """Memory is so short that branches are always being preempted."""
    asked = {
        "greedy": (source_of(family, 50), decoder_prompt(20), greedy(40, logprobs=4)),
        "choices": (source_of(family, 33), decoder_prompt(7), sampled(30, n=3, logprobs=4)),
        "beams": (source_of(family, 50), decoder_prompt(9), beams(3, n=3, max_tokens=12)),
    }

    def numbers(driver: Driver) -> list[Any]:
        keys = [(name, choice) for name in asked for choice in range(asked[name][2].n)]
        answers = [driver.answers[key] for key in keys]
        assert all(answer.error is None and answer.finish_reason is not None for answer in answers)
        return [(list(one.token_ids), one.score, [rows.logprobs for rows in one.logprobs]) for one in answers]

    with core_of(family) as driver:
        for request_id, (source, prompt, params) in asked.items():
            driver.ask(request_id, source, prompt, params)
        driver.run()
        expected = numbers(driver)
    source, prompt = source_of(family, 60), decoder_prompt(70)
    with core_of(family, num_blocks=20, swap_blocks=swap_blocks, max_num_encoder_tokens=100) as driver:
        for request_id, request in asked.items():
            driver.ask(request_id, *request)
        for number in range(12):
            ask_encoder_states(driver, f"encoder {number}", source, range(30), all_layers(family, of_encoder=True))
            ask_states(driver, f"decoder {number}", source, prompt, [0, 30, 69], all_layers(family))
            driver.step()
        driver.run()
        assert numbers(driver) == expected
        of_encoder, of_decoder = oracle_states(family, source, tuple(prompt))
        for number in range(12):
            assert_close(driver[f"encoder {number}"].states, of_encoder[:, :30], f"encoder {number}")
            assert_close(driver[f"decoder {number}"].states, of_decoder[:, [0, 30, 69]], f"decoder {number}")


def test_encoder_states_are_read_within_the_encoders_budget() -> None:
    family, sources = "bart", [source_of("bart", 40, seed) for seed in range(5)]
    with core_of(family, max_num_encoder_tokens=90) as driver:
        driver.ask("g", sources[0], [START], greedy(9))
        for number, source in enumerate(sources):
            ask_encoder_states(driver, str(number), source, [39], [2])
        driver.run()
        runs = [len(plan.encoder_steps) for plan in driver.plans if plan.encoder_steps]
        assert runs == [2, 2, 2]  # one of the first two is that of the text
        for number, source in enumerate(sources):
            assert_close(driver[str(number)].states, oracle_states(family, source, (START,))[0][[2]][:, [39]], "")
        assert_greedy(family, sources[0], [START], driver.tokens("g"))


# ---- an encoder alone ----


@cache
def bert() -> TinyModel:
    return tiny_bert()


BERT_PROMPTS = [random_token_ids(length, seed=length) for length in (1, 2, 16, 17, 33, 70, 100, MAX_POSITION)]


@cache
def bert_states(number: int) -> np.ndarray:
    with torch.inference_mode():
        output = bert().oracle(torch.tensor([BERT_PROMPTS[number]]), output_hidden_states=True)
    return torch.cat([*output.hidden_states, output.last_hidden_state]).numpy()


def pooled(driver: Driver, request_id: str) -> np.ndarray:
    answer = driver[request_id]
    assert answer.error is None and answer.finish_reason == FinishReason.STOP and answer.pooled is not None
    return np.frombuffer(answer.pooled, np.float32)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 140}, {"num_blocks": 12}], ids=str)
def test_vectors_of_bert_are_those_of_transformers(settings: dict[str, Any], backend: str) -> None:
    with core_of(bert(), attention_backend=backend, **({"max_num_batched_tokens": 500} | settings)) as driver:
        for number, prompt in enumerate(BERT_PROMPTS):
            for kind in ("mean", "last"):
                pooling = PoolingParams(pooling=kind)
                driver.add(EngineCoreRequest(f"{kind} {number}", prompt, pooling))
        driver.run()
        for number in range(len(BERT_PROMPTS)):
            expected = bert_states(number)[-1]
            assert_close(pooled(driver, f"mean {number}"), expected.mean(axis=0), f"mean {number}")
            assert_close(pooled(driver, f"last {number}"), expected[-1], f"last {number}")


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 500}, {"num_blocks": 12}], ids=str)
def test_hidden_states_of_bert_are_those_of_transformers(settings: dict[str, Any]) -> None:
    """Every token sees the whole text, so that positions before its end are asked for with all of it."""
    layers = list(range(bert().config.num_layers + 2))
    with core_of(bert(), **settings) as driver:
        for number, prompt in enumerate(BERT_PROMPTS):
            for name, positions in (("all", range(len(prompt))), ("first", [0])):
                request = extraction_of(f"{name} {number}", prompt, positions, layers)
                request.prompt_token_ids = list(prompt)
                driver.add(request)
            driver.add(EngineCoreRequest(str(number), prompt, PoolingParams(pooling="mean")))
        driver.run()
        for number in range(len(BERT_PROMPTS)):
            expected = bert_states(number)
            assert_close(driver[f"all {number}"].states, expected, f"all {number}")
            assert_close(driver[f"first {number}"].states, expected[:, :1], f"first {number}")
            assert_close(pooled(driver, str(number)), expected[-1].mean(axis=0), f"mean {number}")


@exact_on_cpu
def test_vectors_of_bert_are_the_same_bits_in_any_batch() -> None:
    def vectors(**settings: Any) -> list[bytes | None]:
        with core_of(bert(), **settings) as driver:
            for number, prompt in enumerate(BERT_PROMPTS):
                driver.add(EngineCoreRequest(str(number), prompt, PoolingParams(pooling="mean")))
            driver.run()
            return [driver[str(number)].pooled for number in range(len(BERT_PROMPTS))]

    assert vectors(max_num_seqs=1) == vectors(max_num_batched_tokens=500) == vectors(max_num_batched_tokens=150)
