"""A real Gemma 3 of 270 M parameters, from a GGUF file: it continues texts as a trained model does, which wrong norms,
scales, windows or token ids would all prevent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ratoon import LLM, SamplingParams
from tests.golden.engines import check_nothing_left
from tests.real_models import gemma_3

FACTS = "Answers: the capital of Germany is Berlin. The capital of Italy is Rome. The capital of France is"
CODE = "def add(a, b):\n    return a + b\n\ndef multiply(a, b):\n    return"
FILLER = "The weather was mild, and the people of the town went about their work as they did on every other day. " * 40


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    path = gemma_3()
    with LLM(str(path), device="cpu", num_threads=1, max_model_len=1536, num_blocks=512) as built:
        yield built
        check_nothing_left(built)


def answer(llm: LLM, prompt: str, count: int = 8) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=count)
    return llm.generate([prompt], params, progress=False)[0].outputs[0].text


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [(FACTS, " Paris"), (CODE, " a * b"), ("1, 2, 3, 4, 5,", " 6, 7, 8"), ("Once upon a time", ", there was a")],
)
@pytest.mark.one_in(3)
def test_it_continues_as_a_trained_model_does(llm: LLM, prompt: str, expected: str) -> None:
    assert answer(llm, prompt).startswith(expected)


def test_it_does_so_behind_more_text_than_its_windows_hold(llm: LLM) -> None:
    assert len(llm.get_tokenizer().encode(FILLER)) > 600  # the window is 512
    assert answer(llm, f"{FILLER}\n{FACTS}").startswith(" Paris")


@pytest.mark.parametrize(
    "text",
    ["Hello, world!", "line one\n\n\nline two\n\tindented", "    four spaces", "Grüße 🍎 日本語", "a  b   c", ""],
)
def test_a_text_is_its_own_after_encoding_and_decoding(llm: LLM, text: str) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(text)
    assert ids[:1] == [2]  # <bos>
    assert tokenizer.decode(ids[1:]) == text


def test_runs_of_spaces_and_lines_are_single_tokens(llm: LLM) -> None:
    assert len(llm.get_tokenizer().encode("\n\n\n\n        x")) == 4  # <bos>, lines, spaces, x
