"""The whole engine on encoder-decoder models says what transformers says: every number of the decoder, greedy texts and
beam searches, for every family, in mixed batches and in parts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from ratoon.core.params import BeamSearchParams
from tests.depths import both_depths
from tests.golden.beam_oracle import EARLY_STOPPING, PENALTIES, Text, assert_same_texts
from tests.golden.encoder_engines import (
    FAMILIES,
    OTHER_SHAPES,
    START,
    TOLERANCE,
    Driver,
    Source,
    as_rows,
    assert_greedy,
    beams,
    core_of,
    decoder_prompt,
    generate,
    greedy,
    oracle_beams,
    oracle_logprobs,
    sampled,
    source_of,
)
from tests.golden.marks import checked, exact_on_cpu
from tests.golden.tiny_models import MAX_POSITION, VOCAB_SIZE

ENCODER_LENGTHS = [1, 3, 16, 17, 33, 60, 90, MAX_POSITION]
DECODER_LENGTHS = [1, 40, 2, 17, 1, 16, 5, 100]
NUM_NEW = 12
ALL_LOGPROBS: dict[str, Any] = {"logprobs": VOCAB_SIZE, "prompt_logprobs": VOCAB_SIZE}

Asked = tuple[Source, list[int]]  # what the encoder reads, and the decoder's prompt


def mixed_batch(family: str) -> list[Asked]:
    return [
        (source_of(family, encoder_length), decoder_prompt(decoder_length))
        for encoder_length, decoder_length in zip(ENCODER_LENGTHS, DECODER_LENGTHS, strict=True)
    ]


def longest(prompt: list[int], count: int = NUM_NEW) -> int:
    """As many tokens as asked for, or as fit behind the prompt."""
    return min(count, MAX_POSITION - len(prompt))


def ask_all(driver: Driver, batch: list[Asked], count: int = NUM_NEW, **changes: Any) -> None:
    for number, (source, prompt) in enumerate(batch):
        driver.ask(str(number), source, prompt, greedy(longest(prompt, count), **changes))


def assert_all_greedy(driver: Driver, family: str, batch: list[Asked], count: int = NUM_NEW) -> None:
    for number, (source, prompt) in enumerate(batch):
        tokens = driver.tokens(str(number))
        assert len(tokens) == longest(prompt, count)
        assert_greedy(family, source, prompt, tokens, number)


def assert_same_numbers(driver: Driver, request_id: str, family: str, source: Source, prompt: list[int]) -> None:
    """Log-probabilities of all tokens behind every token of the prompt and of the output."""
    chunks = driver.prompt_logprobs.get(request_id, [])
    assert [chunk.start for chunk in chunks] == list(
        np.cumsum([1, *(len(chunk.rows.token_ids) for chunk in chunks)])[:-1]
    )
    parts = [chunk.rows for chunk in chunks] + driver[request_id].logprobs
    ours = as_rows([ids for part in parts for ids in part.token_ids], [row for part in parts for row in part.logprobs])
    whole = [*prompt, *driver.tokens(request_id)[:-1]]
    assert len(ours) == len(whole)
    np.testing.assert_allclose(
        ours, oracle_logprobs(family, source, whole).numpy(), atol=TOLERANCE, rtol=0, err_msg=request_id
    )


# ---- what the other tests rest on ----


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_these_models_depend_on_input_and_position(family: str) -> None:
    texts = []
    for length in (3, 17, 60, 90):
        source = source_of(family, length)
        text = generate(family, source, [START], max_new_tokens=8, num_beams=1).sequences[0, 1:].tolist()
        assert len(set(text)) > 2, text
        assert_greedy(family, source, [START], text)  # as it generates, so it does when it is shown the text
        texts.append(tuple(text))
    assert len(set(texts)) == len(texts), texts


# ---- greedy, and every number ----


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_SHAPES])
@pytest.mark.one_in(3)
def test_every_number_of_a_mixed_batch_is_that_of_transformers(family: str, backend: str) -> None:
    batch = mixed_batch(family)
    with core_of(family, attention_backend=backend, max_num_batched_tokens=512) as driver:
        ask_all(driver, batch, count=6, **ALL_LOGPROBS)
        driver.run()
        assert driver.num_encoder_runs == driver.core.stats().num_encoder_runs == len(batch)
        assert_all_greedy(driver, family, batch, count=6)
        for number, (source, prompt) in enumerate(batch):
            assert_same_numbers(driver, str(number), family, source, prompt)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 1, "max_num_seqs": 3},
        {"max_num_batched_tokens": 7},
        {"max_prefill_chunk": 9, "max_num_seqs": 2},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
        {"block_size": 32, "num_blocks": 80, "enable_prefix_caching": False},
        {"block_size": 5, "num_blocks": 600},
    ],
    ids=str,
)
def test_decoder_prompts_in_parts_give_the_same_numbers(settings: dict[str, Any]) -> None:
    family = "bart"
    batch = mixed_batch(family)
    with core_of(family, **settings) as driver:
        ask_all(driver, batch, count=5, **ALL_LOGPROBS)
        driver.run()
        assert_all_greedy(driver, family, batch, count=5)
        for number, (source, prompt) in enumerate(batch):
            assert_same_numbers(driver, str(number), family, source, prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_come_at_different_times_do_not_disturb_each_other(family: str) -> None:
    chance = random.Random(1)
    waiting = mixed_batch(family)
    with core_of(family, max_num_batched_tokens=24, max_num_seqs=6, max_num_encoder_tokens=100) as driver:
        number = 0
        while number < len(waiting) or driver.core.has_work():
            if number < len(waiting) and chance.random() < 0.3:
                source, prompt = waiting[number]
                driver.ask(str(number), source, prompt, greedy(longest(prompt)))
                number += 1
            if driver.core.has_work():
                driver.step()
        assert_all_greedy(driver, family, waiting)
        assert any(len(plan.encoder_steps) and len(plan.num_scheduled_tokens) > 1 for plan in driver.plans)
        assert driver.num_encoder_runs == len(waiting)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_decoder_that_fills_all_its_positions(family: str) -> None:
    source = source_of(family, MAX_POSITION)
    with core_of(family) as driver:
        for number, length in enumerate((1, 100, MAX_POSITION - 1)):
            driver.ask(str(number), source, decoder_prompt(length), greedy(200))
        driver.run()
        for number, length in enumerate((1, 100, MAX_POSITION - 1)):
            tokens = driver.tokens(str(number))
            assert len(tokens) == MAX_POSITION - length
            assert_greedy(family, source, decoder_prompt(length), tokens)


# ---- sampling ----


@both_depths
@exact_on_cpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(5)
def test_seeded_choices_are_the_same_bits_alone_and_in_a_batch(family: str) -> None:
    def numbers(driver: Driver, number: int) -> list[tuple[Any, ...]]:
        answers = [driver.answers[str(number), choice] for choice in range(3)]
        return [(answer.token_ids, [rows.logprobs for rows in answer.logprobs]) for answer in answers]

    batch = mixed_batch(family)[:6]
    params = [sampled(8, n=3, seed=number, logprobs=5) for number in range(len(batch))]
    alone = []
    with core_of(family) as driver:
        for number, (source, prompt) in enumerate(batch):
            driver.ask(str(number), source, prompt, params[number])
            driver.run()
            alone.append(numbers(driver, number))
    assert len({tuple(tokens) for found in alone for tokens, _ in found}) == 3 * len(batch)
    with core_of(family, max_num_batched_tokens=20, max_num_seqs=14, max_num_encoder_tokens=64) as driver:
        for number, (source, prompt) in enumerate(batch):
            driver.ask(str(number), source, prompt, params[number])
            driver.step()
        driver.run()
        assert [numbers(driver, number) for number in range(len(batch))] == alone
        assert driver.num_encoder_runs == len(batch)


# ---- beams ----


def texts_of(driver: Driver, request_id: str, n: int) -> list[Text]:
    texts = []
    for choice in range(n):
        answer = driver.answers[request_id, choice]
        assert answer.error is None and answer.score is not None, answer.error
        texts.append(Text(list(answer.token_ids), answer.score))
    return texts


def likely_tokens(family: str, source: Source, prompt: list[int]) -> list[int]:
    """Those that the best texts hold, the most frequent first: as stop tokens they end texts at several lengths."""
    texts = oracle_beams(family, source, prompt, beams(6, n=6), None)
    tokens = [token for text in texts for token in text.token_ids]
    return sorted(set(tokens), key=lambda token: (-tokens.count(token), token))


@pytest.mark.parametrize("family", checked(FAMILIES, "bart"))
@pytest.mark.one_in(2)
def test_beam_searches_find_the_texts_of_transformers(family: str) -> None:
    """Of many widths, numbers of texts, penalties and ways to end, all in one batch."""
    chance = random.Random(family)
    searches: dict[str, tuple[Source, list[int], BeamSearchParams, list[int] | None]] = {}
    for number, width in enumerate((1, 2, 3, 5, 8)):
        source, prompt = source_of(family, ENCODER_LENGTHS[number + 1]), decoder_prompt(DECODER_LENGTHS[number])
        stops = chance.sample(likely_tokens(family, source, prompt)[:6], 2) if number else None
        params = beams(
            width, n=chance.randint(1, width), max_tokens=chance.randint(6, 12), all_stop_token_ids=stops or [],
            length_penalty=chance.choice(PENALTIES), early_stopping=chance.choice(EARLY_STOPPING),
            min_tokens=chance.choice([0, 3]),
        )  # fmt: skip
        searches[str(number)] = (source, prompt, params, stops)
    with core_of(family, max_num_batched_tokens=40) as driver:
        for request_id, (source, prompt, params, _) in searches.items():
            driver.ask(request_id, source, prompt, params)
        driver.run()
        assert driver.num_encoder_runs == len(searches)
        for request_id, (source, prompt, params, stops) in searches.items():
            ours = texts_of(driver, request_id, params.n)
            assert_same_texts(ours, oracle_beams(family, source, prompt, params, stops), (request_id, params))


@both_depths
@exact_on_cpu
def test_beams_greedy_and_sampled_requests_in_one_batch_are_the_same_bits_as_alone() -> None:
    family = "t5 with gates and an own head"
    asked = {
        "search": (source_of(family, 17), decoder_prompt(5), beams(4, n=3)),
        "greedy": (source_of(family, 60), decoder_prompt(20), greedy(9)),
        "sampled": (source_of(family, 90), decoder_prompt(2), sampled(9, n=2)),
        "other search": (source_of(family, 33), decoder_prompt(1), beams(6, n=2)),
    }

    def answers(driver: Driver) -> dict[Any, Any]:
        return {key: (answer.token_ids, answer.score) for key, answer in driver.answers.items()}

    with core_of(family) as driver:
        for request_id, (source, prompt, params) in asked.items():
            driver.ask(request_id, source, prompt, params)
            driver.run()
        alone = answers(driver)
    with core_of(family, max_num_batched_tokens=30) as driver:
        for request_id, (source, prompt, params) in asked.items():
            driver.ask(request_id, source, prompt, params)
        driver.run()
        assert answers(driver) == alone


# ---- the encoder's budget ----


@pytest.mark.parametrize("family", ["marian", "whisper"])
@pytest.mark.parametrize("budget", [1, 29, 40, 70, 100, 1000])
@pytest.mark.one_in(5)
def test_encoder_inputs_are_never_divided_and_all_get_their_answers(family: str, budget: int) -> None:
    batch = mixed_batch(family)
    with core_of(family, max_num_encoder_tokens=budget, max_num_batched_tokens=300) as driver:
        ask_all(driver, batch)
        driver.run()
        assert_all_greedy(driver, family, batch)
        assert driver.num_encoder_runs == len(batch)
        for plan in driver.plans:
            lengths = [step.encoder_input.num_positions for step in plan.encoder_steps]
            assert sum(lengths) <= budget or len(lengths) == 1
        largest = max(len(plan.encoder_steps) for plan in driver.plans)
        assert largest == 1 if budget == 1 else largest > 1 or budget < 60


def test_a_step_whose_encoder_budget_is_spent_admits_nobody_else_and_the_first_in_the_queue_is_next() -> None:
    family = "bart"
    sources = [source_of(family, length) for length in (60, 60, 3, 60)]
    sources[1] = source_of(family, 60, seed=1)
    with core_of(family, max_num_encoder_tokens=64) as driver:
        for number, source in enumerate(sources):
            driver.ask(str(number), source, [START], greedy(8))
        driver.run()
        runs = [[step.req_id for step in plan.encoder_steps] for plan in driver.plans if plan.encoder_steps]
        assert runs == [["0"], ["1", "2"]]  # the last reads what the first did, and needs no run
        for number, source in enumerate(sources):
            assert_greedy(family, source, [START], driver.tokens(str(number)))
