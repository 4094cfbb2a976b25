"""Beam search through the engine gives the texts and the scores of transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from ratoon import LLM, BeamSearchParams, RequestError, RequestOutputKind
from tests.golden.beam_oracle import (
    EARLY_STOPPING,
    PENALTIES,
    TOLERANCE,
    Text,
    assert_same_texts,
    likely_tokens,
    oracle_search,
    stop_tokens,
    texts_of,
)
from tests.golden.engines import check_nothing_left, engine, oracle_tokens, tiny_model
from tests.golden.tiny_models import MAX_POSITION, VOCAB_SIZE, random_token_ids

LLAMA = "llama with grouped heads"
QWEN3 = "qwen3 untied with heads that the native kernels take"
FAMILIES = [
    LLAMA,
    QWEN3,
    "mistral with a window shorter than the sequence",
    "mistral with a window wider than a block",
    "qwen2 with windows by layer type",
    "gpt2",
]
EOS = 2  # of all tiny models
MAX_TOKENS = 12

Search = tuple[list[int], BeamSearchParams]


def expected(family: str, prompt: list[int], params: BeamSearchParams) -> list[Text]:
    stops = [*(params.stop_token_ids or ()), *([] if params.ignore_eos else [EOS])]
    return oracle_search(tiny_model(family).oracle, prompt, params, stops or None)


def search(llm: LLM, searches: list[Search]) -> list[list[Text]]:
    """All at once."""
    outputs = llm.beam_search([prompt for prompt, _ in searches], [params for _, params in searches], progress=False)
    return [texts_of(output) for output in outputs]


def check(llm: LLM, family: str, searches: list[Search]) -> list[list[Text]]:
    found = search(llm, searches)
    for ours, (prompt, params) in zip(found, searches, strict=True):
        assert_same_texts(ours, expected(family, prompt, params), (prompt, params))
    return found


def some_search(family: str, chance: random.Random, **settings: Any) -> Search:
    prompt = random_token_ids(chance.choice([1, 5, 15, 16, 17, 30, 40]), seed=chance.randrange(8))
    width = chance.choice([2, 3, 4, 5, 8, 11])
    max_tokens = chance.randint(1, MAX_TOKENS)
    kind = chance.choice(["likely", "several", "unlikely", "none"])
    params = BeamSearchParams(
        beam_width=width,
        n=chance.choice([width, chance.randint(1, width)]),
        max_tokens=max_tokens,
        min_tokens=chance.choice([0, 0, chance.randint(0, max_tokens)]),
        stop_token_ids=stop_tokens(kind, family, prompt, chance),
        ignore_eos=chance.choice([False, True]),
        **settings,
    )
    return prompt, params


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.one_in(5)
def test_texts_and_scores_are_those_of_transformers(family: str, early_stopping: Any) -> None:
    chance = random.Random(f"{family} {early_stopping}")
    searches = [
        some_search(family, chance, length_penalty=penalty, early_stopping=early_stopping) for penalty in PENALTIES
    ]
    with engine(family) as llm:
        check(llm, family, searches)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 7, 8, 16, 32])
@pytest.mark.one_in(3)
def test_every_width(width: int) -> None:
    prompt = random_token_ids(14, seed=width)  # the search crosses into the next block
    stops = likely_tokens(LLAMA, tuple(prompt))[2:4]
    settings: dict[str, Any] = {"beam_width": width, "n": width, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    with engine(LLAMA, num_blocks=200) as llm:
        free = (prompt, BeamSearchParams(**settings))
        stopped = (prompt, BeamSearchParams(**settings, stop_token_ids=stops))
        check(llm, LLAMA, [free])
        check(llm, LLAMA, [stopped])


def test_a_thousand_beams() -> None:
    """More beams than the vocabulary has words: the first step can't fill them."""
    prompt = random_token_ids(15, seed=3)
    settings: dict[str, Any] = {"beam_width": 1024, "n": 64, "ignore_eos": True}
    stops = likely_tokens(LLAMA, tuple(prompt))[:2]
    with engine(LLAMA, max_num_seqs=1024, max_num_batched_tokens=2048, num_blocks=2100) as llm:
        check(llm, LLAMA, [(prompt, BeamSearchParams(max_tokens=4, **settings))])
        check(llm, LLAMA, [(prompt, BeamSearchParams(max_tokens=5, stop_token_ids=stops, **settings))])


def test_a_search_finds_every_text_that_there_is() -> None:
    """One token each, and the stop token is held back: 96 texts, and no more can be asked for."""
    settings: dict[str, Any] = {"beam_width": 128, "max_tokens": 1, "min_tokens": 1, "stop_token_ids": [5]}
    with engine(LLAMA, max_num_seqs=128, num_blocks=200) as llm:
        [texts] = search(llm, [([1, 2, 3], BeamSearchParams(n=96, ignore_eos=True, **settings))])
        found = sorted(token for text in texts for token in text.token_ids)
        assert found == [token for token in range(VOCAB_SIZE) if token != 5]
        with pytest.raises(RequestError) as refused:
            llm.beam_search([1, 2, 3], BeamSearchParams(n=97, ignore_eos=True, **settings), progress=False)
        assert refused.value.field == "n"


@pytest.mark.parametrize("family", [LLAMA, QWEN3, "mistral with a window shorter than the sequence"])
def test_a_long_search_over_many_blocks(family: str) -> None:
    prompt = random_token_ids(20, seed=4)
    with engine(family) as llm:
        check(llm, family, [(prompt, BeamSearchParams(beam_width=5, n=5, max_tokens=60, ignore_eos=True))])


def test_the_model_s_own_end_token_ends_texts() -> None:
    prompt = random_token_ids(6, seed=56)  # it is the most probable token behind this one
    settings: dict[str, Any] = {"beam_width": 8, "n": 8, "max_tokens": 6, "length_penalty": -1.0}
    with engine(LLAMA) as llm:
        [best, *_] = check(llm, LLAMA, [(prompt, BeamSearchParams(**settings))])[0]
        assert best.token_ids == [EOS]
        [ignored] = check(llm, LLAMA, [(prompt, BeamSearchParams(ignore_eos=True, **settings))])
        assert {len(text.token_ids) for text in ignored} == {6}


def test_stop_tokens_are_held_back_until_min_tokens() -> None:
    prompt = random_token_ids(9, seed=1)
    stops = likely_tokens(LLAMA, tuple(prompt))[:3]
    with engine(LLAMA) as llm:
        for min_tokens in range(0, 9, 2):
            params = BeamSearchParams(
                beam_width=6, n=6, max_tokens=10, min_tokens=min_tokens, stop_token_ids=stops, length_penalty=-1.0
            )
            [texts] = check(llm, LLAMA, [(prompt, params)])
            # With the penalty that likes short texts best, the first that ends does so as soon as it may.
            assert min(len(text.token_ids) for text in texts) == min_tokens + 1
            assert not {token for text in texts for token in text.token_ids[:min_tokens]} & set(stops)


def test_without_a_limit_a_search_fills_the_model_s_length() -> None:
    prompt = random_token_ids(MAX_POSITION - 7, seed=2)
    with engine(LLAMA) as llm:
        open_ended = BeamSearchParams(beam_width=3, n=3, max_tokens=None, ignore_eos=True)
        [texts] = search(llm, [(prompt, open_ended)])
        limited = BeamSearchParams(beam_width=3, n=3, max_tokens=7, ignore_eos=True)
        assert_same_texts(texts, expected(LLAMA, prompt, limited), prompt)
        too_much = BeamSearchParams(beam_width=3, n=3, max_tokens=70, ignore_eos=True)
        assert search(llm, [(prompt, too_much)]) == [texts]


def test_n_best_are_the_first_of_all() -> None:
    prompt = random_token_ids(9, seed=3)
    stops = likely_tokens(LLAMA, tuple(prompt))[1:3]
    with engine(LLAMA) as llm:
        [everything], *some = (
            search(llm, [(prompt, BeamSearchParams(beam_width=6, n=n, max_tokens=8, stop_token_ids=stops))])
            for n in (6, 1, 2, 5)
        )
    assert [texts for [texts] in some] == [everything[:1], everything[:2], everything[:5]]


def test_one_beam_is_greedy_search() -> None:
    prompt = random_token_ids(9, seed=2)
    with engine(QWEN3) as llm:
        [[text]] = search(llm, [(prompt, BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True))])
    assert text.token_ids == oracle_tokens(QWEN3, prompt, 8)


# ---- what a caller sees of it ----


def text_behind(llm: LLM, prompt: list[int], token_ids: Sequence[int]) -> str:
    decode = llm.get_tokenizer().decode
    return decode([*prompt, *token_ids]).removeprefix(decode(prompt))


def test_every_choice_says_how_it_ended_and_what_it_is_worth() -> None:
    prompt = random_token_ids(9, seed=0)
    stops = likely_tokens(LLAMA, tuple(prompt))[:1]
    params = BeamSearchParams(
        beam_width=6, n=6, max_tokens=8, stop_token_ids=stops, ignore_eos=True, early_stopping="never"
    )
    with engine(LLAMA, skip_tokenizer=False) as llm:
        (output,) = llm.beam_search(prompt, params, progress=False)
        assert output.finished and output.prompt_token_ids == prompt
        assert [choice.index for choice in output.outputs] == list(range(6))
        assert {choice.finish_reason for choice in output.outputs} == {"stop", "length"}
        for choice in output.outputs:
            stopped = choice.token_ids[-1] in stops
            assert choice.finish_reason == ("stop" if stopped else "length")
            assert choice.stop_reason == (stops[0] if stopped else None)
            assert choice.text == text_behind(llm, prompt, choice.token_ids[:-1] if stopped else choice.token_ids)
            assert choice.cumulative_logprob is not None
            assert choice.score == pytest.approx(choice.cumulative_logprob / len(choice.token_ids), abs=TOLERANCE)


def test_generate_takes_both_kinds_of_params_in_one_batch() -> None:
    prompt = random_token_ids(9, seed=0)
    beams = BeamSearchParams(beam_width=4, n=2, max_tokens=5, ignore_eos=True)
    with engine(LLAMA) as llm:
        sampled = llm.get_default_sampling_params()
        sampled.temperature, sampled.max_tokens, sampled.ignore_eos = 0.0, 5, True
        searched, greedy = llm.generate([prompt] * 2, [beams, sampled], progress=False)
    assert_same_texts(texts_of(searched), expected(LLAMA, prompt, beams), prompt)
    assert list(greedy.outputs[0].token_ids) == oracle_tokens(LLAMA, prompt, 5)
    assert greedy.outputs[0].score is None


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
def test_a_stream_holds_the_best_text_after_every_step_and_ends_with_the_result(early_stopping: Any) -> None:
    prompt = random_token_ids(9, seed=5)
    stops = likely_tokens(LLAMA, tuple(prompt))[1:2]
    params = BeamSearchParams(
        beam_width=4, n=3, max_tokens=9, stop_token_ids=stops, early_stopping=early_stopping, ignore_eos=True,
        output_kind=RequestOutputKind.CUMULATIVE,
    )  # fmt: skip
    with engine(LLAMA, skip_tokenizer=False) as llm:
        (final,) = llm.beam_search(prompt, params, progress=False)
        *on_the_way, last = llm.stream(prompt, params)
        assert last.finished and last.outputs == final.outputs
        assert on_the_way and not any(output.finished for output in on_the_way)
        for num_tokens, output in enumerate(on_the_way, start=1):
            (best,) = output.outputs
            assert best.finish_reason is None and best.score is not None
            stopped = best.token_ids[-1] in stops
            assert len(best.token_ids) <= num_tokens if stopped else len(best.token_ids) == num_tokens
            assert best.text == text_behind(llm, prompt, best.token_ids[:-1] if stopped else best.token_ids)
        # After the first step the best text is the most probable token, and at the end it is the first choice.
        assert list(on_the_way[0].outputs[0].token_ids) == oracle_tokens(LLAMA, prompt, 1)


def test_a_search_that_the_engine_can_never_hold_is_refused_and_others_go_on() -> None:
    prompt = random_token_ids(9, seed=0)
    good = BeamSearchParams(beam_width=4, n=2, max_tokens=5, ignore_eos=True)
    with engine(LLAMA, max_num_seqs=8, num_blocks=20) as llm:
        too_wide = BeamSearchParams(beam_width=9, max_tokens=5)
        too_long = BeamSearchParams(beam_width=8, max_tokens=100)
        first, wide, long = llm.beam_search([prompt] * 3, [good, too_wide, too_long], progress=False)
        assert_same_texts(texts_of(first), expected(LLAMA, prompt, good), prompt)
        assert "max_num_seqs" in (wide.error or "") and "blocks" in (long.error or "")
        for params in (too_wide, too_long):
            with pytest.raises(RequestError) as refused:
                llm.beam_search(prompt, params, progress=False)
            assert refused.value.field == "beam_width"
        check_nothing_left(llm)
