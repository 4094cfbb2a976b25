"""SmolLM2 out of the embedded GGUF file: the answers of transformers, which reads the same file, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ratoon.api.llm import LLM
from ratoon.core.errors import ModelError
from ratoon.core.params import PoolingParams, SamplingParams
from ratoon.models.embedded import find_embedded_model
from tests.golden.engines import check_nothing_left
from tests.golden.gguf_oracle import load_oracle

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m"
COUNT = 24
TEXTS = [
    "The three primary colours are",
    "def fibonacci(n):\n    ",
    "1, 2, 4, 8, 16,",
    "Am Anfang war das",
    "Once upon a time, in a village by the sea, there lived a clockmaker who never slept. Every night, when the lamps "
    "went out one after the other, he climbed the tower and",
]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "Name two fruits."}],
    [
        {"role": "user", "content": "Hi, I am Ann."},
        {"role": "assistant", "content": "Hello Ann! How can I help you?"},
        {"role": "user", "content": "What is my name?"},
    ],
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    try:
        find_embedded_model(MODEL)
    except ModelError as error:  # its text has the command that installs it
        pytest.skip(str(error))
    with LLM(MODEL, num_blocks=200, max_num_seqs=32, num_threads=1, quantization="none") as built:
        yield built


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    return [*map(llm.get_tokenizer().encode, TEXTS), *(llm.chat_prompt(chat)["prompt_token_ids"] for chat in CHATS)]


@pytest.fixture(scope="module")
def oracle() -> Any:
    return load_oracle(MODEL)


@pytest.fixture(scope="module")
def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Ours, to all prompts in one batch."""
    return generate(llm, prompts)


@pytest.fixture(scope="module")
def expected(oracle: Any, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """The most probable token of transformers at every position of our answer: if all are the same, the answer is the
    one that transformers would give. That takes one pass over it, and not one for each token."""
    tokens = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        tokens.append(logits.argmax(-1).tolist())
    return tokens


def generate(llm: LLM, prompts: list[list[int]], **changes: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, **changes)
    outputs = llm.generate([list(prompt) for prompt in prompts], params, progress=False)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_a_batch_of_texts_and_chats_gets_the_answers_of_transformers(
    llm: LLM, answers: list[list[int]], expected: list[list[int]]
) -> None:
    assert answers == expected
    assert all(len(answer) == COUNT or answer[-1] in llm.source.config.eos_token_ids for answer in answers)
    assert len({tuple(answer) for answer in answers}) == len(answers)
    check_nothing_left(llm)


def test_and_again_from_the_prefix_cache(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    generate(llm, prompts[4:6])
    hits = llm.stats().prefix_cache.hits
    assert generate(llm, prompts[4:6]) == expected[4:6]
    assert llm.stats().prefix_cache.hits - hits == sum((len(prompt) - 1) // 16 * 16 for prompt in prompts[4:6])


def test_logprobs_are_those_of_transformers(llm: LLM, prompts: list[list[int]], oracle: Any) -> None:
    prompt = prompts[4]
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, prompt_logprobs=0)
    (output,) = llm.generate([list(prompt)], params, progress=False)
    choice = output.outputs[0]
    sequence = prompt + list(choice.token_ids)
    with torch.inference_mode():
        logprobs = oracle(torch.tensor([sequence])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None and choice.logprobs is not None
    rows = output.prompt_logprobs[1:] + choice.logprobs
    assert len(rows) == len(sequence) - 1
    for position, row in enumerate(rows):
        assert row is not None and sequence[position + 1] in row
        for token, entry in row.items():
            assert entry.logprob == pytest.approx(logprobs[position, token].item(), abs=1e-3)


def test_the_chat_answer_is_the_text_of_those_tokens(llm: LLM, expected: list[list[int]]) -> None:
    (output,) = llm.chat(CHATS[0], SamplingParams(temperature=0.0, max_tokens=COUNT), progress=False)
    assert list(output.outputs[0].token_ids) == expected[5]
    assert output.outputs[0].text == llm.get_tokenizer().decode(expected[5]) == "The capital of France is Paris."
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_a_stop_string_ends_one_choice_and_the_others_go_on(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.2, seed=1, max_tokens=30, ignore_eos=True)
    (whole,) = llm.generate(["Once upon a time"], params, progress=False)
    # A stop string that is in the first half of one choice and not in all others.
    texts = [choice.text for choice in whole.outputs]
    words = texts[1].split()[3:15]
    stop = next(word for word in words if len(word) > 3 and any(word not in text for text in texts))
    (cut,) = llm.generate(["Once upon a time"], msgspec.structs.replace(params, stop=[stop]), progress=False)
    for text, choice in zip(texts, cut.outputs, strict=True):
        expected, found, _ = text.partition(stop)
        assert choice.text == expected
        assert (choice.finish_reason, choice.stop_reason) == (("stop", stop) if found else ("length", None))


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.one_in(2)
def test_vectors_are_those_of_transformers(llm: LLM, prompts: list[list[int]], oracle: Any, pooling: str) -> None:
    outputs = llm.embed(prompts, PoolingParams(pooling=pooling), progress=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            states = oracle.base_model(torch.tensor([prompt])).last_hidden_state[0].numpy()
        expected = states[-1] if pooling == "last" else states.mean(axis=0)
        np.testing.assert_allclose(output.embedding, expected / np.linalg.norm(expected), atol=1e-4, rtol=0)
    check_nothing_left(llm)
