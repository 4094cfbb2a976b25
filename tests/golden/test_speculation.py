"""Drafts from sources of their own, through whole engines: answers are the same as without, to the bit."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from ratoon import LLM, SamplingParams
from ratoon.core.outputs import RequestOutput
from tests.golden.engines import engine, scheduler_of
from tests.golden.grammar_engines import forced_texts
from tests.golden.marks import exact_on_cpu
from tests.golden.test_encoder_decoder_api import INPUTS
from tests.golden.test_encoder_decoder_api import engine as encoder_engine
from tests.golden.test_steps_in_flight import LLAMA, TWO_GROUPS, WIDE_WINDOW, all_of, served
from tests.golden.test_steps_in_flight import ask as ask_everything
from tests.unit.layers.test_rejection import highest_statistic

pytestmark = exact_on_cpu

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 10], list(range(20, 50)) * 2, [5, 6, 7, 8, 11]]
FAMILIES = [LLAMA, WIDE_WINDOW, "gpt2"]
# One token that occurred before is enough for a draft, whatever its rows cost: many, of which most are wrong
SETTINGS: dict[str, Any] = {
    "speculate": "ngram", "speculate_ngram_min": 1, "speculate_min_acceptance": 0.0, "speculate_max_seqs": 32
}  # fmt: skip
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    "drawn": SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True),
    "filtered": SamplingParams(
        temperature=0.7, top_k=5, min_p=0.05, seed=4, max_tokens=40, ignore_eos=True, logprobs=3
    ),
    "choices": SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=30, ignore_eos=True, logprobs=2),
    "penalised": SamplingParams(
        temperature=0.8, seed=7, repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=40, ignore_eos=True
    ),
    "stopped": SamplingParams(temperature=0.0, stop_token_ids=[3, 50, 90], min_tokens=4, max_tokens=40),
    "few": SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
    "biased": SamplingParams(
        temperature=0.0, max_tokens=40, logit_bias={5: 4.0, 6: 4.0}, no_repeat_ngram_size=4, ignore_eos=True
    ),
}


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (choice.token_ids, choice.finish_reason, choice.stop_reason, choice.cumulative_logprob, choice.logprobs)
        for output in outputs
        for choice in output.outputs
    ]


def ask(llm: LLM, params: SamplingParams) -> list[Any]:
    return answers(llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, progress=False))


def num_checked(llm: LLM, source: str = "ngram") -> tuple[int, int]:
    """The tokens that were drafted, and accepted."""
    stats = scheduler_of(llm).stats().drafts.get(source)
    return (0, 0) if stats is None else (stats.draft_tokens, stats.accepted_tokens)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(2)
def test_drafts_change_no_text_and_no_log_probability(family: str, depth: int) -> None:
    with engine(family) as llm:
        expected = {name: ask(llm, params) for name, params in PARAMS.items()}
    with engine(family, max_steps_in_flight=depth, **SETTINGS) as llm:
        for name, params in PARAMS.items():
            assert ask(llm, params) == expected[name], name
        num_drafted, num_accepted = num_checked(llm)
        assert 0 < num_accepted < num_drafted, "some were right, and some wrong"


def test_a_text_that_repeats_takes_fewer_steps() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logit_bias={4: 100.0})
    prompt = {"prompt_token_ids": [1, 4, 4, 4, 4]}
    with engine(FAMILIES[0], speculate="ngram", speculate_max_seqs=32) as llm:
        llm.generate(prompt, params, progress=False)
        assert scheduler_of(llm).planner.num_steps < 20
        assert num_checked(llm)[1] > 40
        before = scheduler_of(llm).planner.num_steps
        params.speculate = False
        llm.generate(prompt, params, progress=False)
        assert scheduler_of(llm).planner.num_steps - before >= 60


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("family", [LLAMA, TWO_GROUPS])
@pytest.mark.one_in(5)
def test_answers_leases_continuations_and_hidden_states_are_the_same(family: str, depth: int) -> None:
    """Of requests that end by length, by a token and by a string, with log-probabilities, choices, beams and hidden
    states."""
    right = served(family, depth=1)
    for what, found in served(family, depth, **SETTINGS).items():
        # Blocks before a window are given back whenever memory is allocated, and so for every draft.
        assert found == right[what] or (what == "leases" and family == TWO_GROUPS), what


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("swap_memory", [0, "1MiB"], ids=["recomputed", "swapped"])
@pytest.mark.parametrize(("family", "num_blocks"), [(LLAMA, 14), (TWO_GROUPS, 26)])
@pytest.mark.one_in(7)
def test_answers_are_the_same_where_memory_is_short(
    family: str, num_blocks: int, swap_memory: int | str, depth: int
) -> None:
    settings = {"num_blocks": num_blocks, "swap_memory": swap_memory, "skip_tokenizer": False, **SETTINGS}
    with engine(family, max_steps_in_flight=depth, max_num_batched_tokens=40, **settings) as llm:
        assert [all_of(output) for output in ask_everything(llm)] == served(family, depth=1)["answers"]
        assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.one_in(3)
def test_structured_texts_are_the_same(depth: int, jumps: bool) -> None:
    """Drafts are cut where the grammar forbids them, and where it forces other tokens."""
    settings = {"max_steps_in_flight": depth, "jump_forward": jumps}
    right, found = (forced_texts(others=True, **settings, **more) for more in ({}, SETTINGS))
    assert found.answers == right.answers


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_give_the_same_answers(quantization: str) -> None:
    with engine(LLAMA, quantization=quantization) as llm:
        expected = [ask(llm, params) for params in PARAMS.values()]
    with engine(LLAMA, quantization=quantization, **SETTINGS) as llm:
        assert [ask(llm, params) for params in PARAMS.values()] == expected
        assert num_checked(llm)[1] > 0


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_encoder_decoder_models_give_the_same_answers(family: str) -> None:
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=30, ignore_eos=True, logprobs=1)
    with encoder_engine(family) as llm:
        expected = answers(llm.generate(INPUTS, params, progress=False))
    with encoder_engine(family, **SETTINGS) as llm:
        assert answers(llm.generate(INPUTS, params, progress=False)) == expected
        assert num_checked(llm)[0] > 0


def test_a_prediction_changes_no_text_and_takes_fewer_steps() -> None:
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=40, ignore_eos=True, logprobs=1)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:1]]
    with engine(LLAMA, speculate_max_seqs=8) as llm:
        outputs = llm.generate(prompts, params, progress=False)
        before = scheduler_of(llm).planner.num_steps
        tokens = list(outputs[0].outputs[0].token_ids)
        params.prediction = [*tokens[:20], 1, 2, 3, *tokens[22:]]
        (again,) = llm.generate(prompts, params, progress=False)
        assert answers([again]) == answers(outputs)
        assert again.metrics is not None
        assert again.metrics.num_accepted_prediction_tokens > 20 > again.metrics.num_rejected_prediction_tokens > 0
        assert scheduler_of(llm).planner.num_steps - before < 20


def test_rejection_sampling_keeps_the_distribution() -> None:
    """Of texts over three tokens, from engines with and without drafts: by a test of chi-square for two samples."""

    def count_texts(**settings: Any) -> tuple[Counter[tuple[int, ...]], int]:
        texts: Counter[tuple[int, ...]] = Counter()
        with engine(LLAMA, num_blocks=400, max_num_seqs=256, **settings) as llm:
            for seed in range(20):
                params = SamplingParams(n=60, seed=seed, max_tokens=5, allowed_token_ids=[4, 7, 9], ignore_eos=True)
                (output,) = llm.generate([{"prompt_token_ids": [4, 7, 9, 4, 4, 7]}], params, progress=False)
                texts.update(tuple(choice.token_ids[1:4]) for choice in output.outputs)
            return texts, num_checked(llm)[1]

    drafts = SETTINGS | {"speculate_max_seqs": 64}
    plain, _ = count_texts()
    kept, num_accepted = count_texts(draft_acceptance="rejection", **drafts)
    assert num_accepted > 300 and plain.total() == kept.total() and plain != kept
    cells = [(plain[text], kept[text]) for text in plain.keys() | kept.keys()]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells)
    assert statistic < highest_statistic(len(cells) - 1)


def test_rejection_sampling_changes_no_greedy_text_and_obeys_grammars() -> None:
    with engine(LLAMA) as llm:
        expected = [ask(llm, PARAMS[name]) for name in ("greedy", "stopped", "biased")]
    with engine(LLAMA, draft_acceptance="rejection", **SETTINGS) as llm:
        assert [ask(llm, PARAMS[name]) for name in ("greedy", "stopped", "biased")] == expected
        assert len(ask(llm, PARAMS["choices"])[0][4]) == 30, "log-probabilities of all tokens"
        assert num_checked(llm)[1] > 0
    texts = forced_texts(draft_acceptance="rejection", **SETTINGS).answers
    assert all(json.loads(text) for _, text, why, _ in texts if why == "stop" and text.endswith("}"))
