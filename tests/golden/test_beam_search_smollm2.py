"""Beam search with SmolLM2 in float32: the texts and scores of transformers, from prompts and from leased parents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ratoon import LLM, BeamSearchParams, ModelError, RequestOutput, SamplingParams
from ratoon.models.embedded import find_embedded_model
from tests.golden.answers import num_computed, whole
from tests.golden.beam_oracle import Text, assert_same_texts, oracle_search, texts_of
from tests.golden.engines import check_nothing_left
from tests.golden.gguf_oracle import load_oracle

pytestmark = [pytest.mark.slow, pytest.mark.full]

MODEL = "smollm2-135m"
STORY = "Once upon a time, in a village by the sea,"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SEARCHES: list[tuple[str, BeamSearchParams]] = [
    ("The three primary colours are", BeamSearchParams(beam_width=2, n=2, max_tokens=12)),
    ("def fibonacci(n):\n    ", BeamSearchParams(beam_width=4, n=3, max_tokens=10, length_penalty=0.5)),
    ("1, 2, 4, 8, 16,", BeamSearchParams(beam_width=8, n=8, max_tokens=6, length_penalty=2.0)),
    (STORY, BeamSearchParams(beam_width=32, n=32, max_tokens=3)),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    try:
        find_embedded_model(MODEL)
    except ModelError as error:  # its text has the command that installs it
        pytest.skip(str(error))
    with LLM(MODEL, num_blocks=400, max_num_seqs=64, num_threads=1, quantization="none") as built:
        yield built
        check_nothing_left(built)


@pytest.fixture(scope="module")
def oracle(llm: LLM) -> Any:
    return load_oracle(MODEL)


def expected(llm: LLM, oracle: Any, prompt: list[int], params: BeamSearchParams) -> list[Text]:
    return oracle_search(oracle, prompt, params, list(llm.source.config.eos_token_ids))


@pytest.mark.full
def test_searches_in_one_batch_beside_a_sampled_text(llm: LLM, oracle: Any) -> None:
    prompts, params = zip(*SEARCHES)
    sampled = SamplingParams(temperature=0.8, seed=1, max_tokens=12)
    outputs = llm.generate([*prompts, "Hello"], [*params, sampled], progress=False)
    for output, one in zip(outputs, params):
        assert output.prompt_token_ids is not None
        assert_same_texts(texts_of(output), expected(llm, oracle, output.prompt_token_ids, one), output.prompt)
        assert {choice.text for choice in output.outputs} == {
            llm.get_tokenizer().decode(choice.token_ids) for choice in output.outputs
        }


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.one_in(3)
def test_answers_of_a_chat_end_with_the_model_s_own_end_token(llm: LLM, oracle: Any, early_stopping: Any) -> None:
    params = BeamSearchParams(beam_width=4, n=4, max_tokens=12, early_stopping=early_stopping)
    prompt = llm.chat_prompt(QUESTION)["prompt_token_ids"]
    (output,) = llm.beam_search(prompt, params, progress=False)
    assert_same_texts(texts_of(output), expected(llm, oracle, prompt, params), early_stopping)
    best = output.outputs[0]
    assert (best.finish_reason, best.text) == ("stop", "The capital of France is Paris.")


def test_two_stages(llm: LLM, oracle: Any) -> None:
    """A sampled first stage whose memory is leased, then beams behind it, and beams behind one of those."""
    stage_1 = SamplingParams(temperature=0.7, seed=5, max_tokens=10, ignore_eos=True)
    (first,) = llm.generate(STORY, stage_1, retain_kv=600, progress=False)
    beams = BeamSearchParams(beam_width=8, n=8, max_tokens=3, ignore_eos=True)
    second = _continued(llm, first, 0, beams)
    third = _continued(llm, second, 5, beams)
    for output in (second, third):
        assert output.prompt_token_ids is not None
        assert_same_texts(texts_of(output), oracle_search(oracle, output.prompt_token_ids, beams, None), output)
    assert llm.reset_prefix_cache()  # and no lease


def _continued(llm: LLM, parent: RequestOutput, choice: int, beams: BeamSearchParams) -> RequestOutput:
    before = num_computed(llm)
    child = llm.generate_continuation(parent, " Then", beams, choice=choice, retain_kv=600)
    suffix = llm.get_tokenizer().encode(" Then")
    assert child.prompt_token_ids == whole(parent, choice) + suffix
    assert child.continuation is not None and child.continuation.source == "lease"
    assert num_computed(llm) - before == len(suffix) + 1 + beams.beam_width * 2
    return child
