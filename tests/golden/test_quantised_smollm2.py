"""SmolLM2 in the bits of its file against the same file decoded to float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratoon.api.llm import LLM
from ratoon.core.errors import ModelError
from ratoon.core.params import SamplingParams
from ratoon.layers.native import library
from ratoon.models.embedded import find_embedded_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library() is None, reason="no kernels for this processor; `make setup` builds them"),
]

MODEL = "smollm2-135m"
TEXT = (Path(__file__).parents[2] / "README.md").read_text()
LENGTH = 400  # tokens
QUESTIONS = ["The three primary colours are", "1, 2, 4, 8, 16,", "Once upon a time, in a village by the sea,",
             "Water boils at a temperature of", "The opposite of hot is"]  # fmt: skip


@pytest.fixture(scope="module")
def decoded() -> Iterator[LLM]:
    yield from engine("none")


@pytest.fixture(scope="module")
def kept() -> Iterator[LLM]:
    yield from engine("auto")


def engine(quantization: str) -> Iterator[LLM]:
    try:
        find_embedded_model(MODEL)
    except ModelError as error:  # its text has the command that installs it
        pytest.skip(str(error))
    with LLM(MODEL, num_blocks=200, max_num_seqs=32, device="cpu", quantization=quantization) as built:
        yield built


def perplexity(llm: LLM, tokens: list[int]) -> float:
    [output] = llm.generate([{"prompt_token_ids": tokens}], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    found = [entry[token].logprob for token, entry in zip(tokens, output.prompt_logprobs) if entry]
    return math.exp(-sum(found) / len(found))


@pytest.mark.full
def test_perplexity_is_that_of_the_decoded_weights_within_a_percent(decoded: LLM, kept: LLM) -> None:
    tokens = decoded.get_tokenizer().encode(TEXT)[:LENGTH]
    assert perplexity(kept, tokens) == pytest.approx(perplexity(decoded, tokens), rel=0.01)


def test_memory_is_about_that_of_the_file_and_the_facts_say_what_is_kept(decoded: LLM, kept: LLM) -> None:
    size = find_embedded_model(MODEL).stat().st_size
    facts = kept.describe()
    assert facts["weight_bytes"] < 1.1 * size < decoded.describe()["weight_bytes"]
    assert {one["format"] for one in facts["weight_formats"]} == {"Q4_1", "Q8_0", "float32"}
    assert [one["format"] for one in decoded.describe()["weight_formats"]] == ["float32"]


def test_most_greedy_tokens_are_those_of_the_decoded_weights(decoded: LLM, kept: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    answers = [[output.outputs[0].token_ids for output in llm.generate(QUESTIONS, params)] for llm in (decoded, kept)]
    same = sum(ours == theirs for ours, theirs in zip(*answers))
    assert same >= len(QUESTIONS) - 2


def test_an_answer_does_not_depend_on_its_batch(kept: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    together = kept.generate(QUESTIONS, params)
    kept.reset_prefix_cache()
    for question, output in zip(QUESTIONS, together):
        [alone] = kept.generate([question], params)
        kept.reset_prefix_cache()
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].cumulative_logprob == output.outputs[0].cumulative_logprob
