"""A real BART, which spells English words as phonemes: the words as they are known, and as transformers spells them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import BartForConditionalGeneration

from ratoon import LLM, BeamSearchParams, SamplingParams
from tests.golden.beam_oracle import Text, assert_same_texts, texts_of
from tests.golden.engines import check_nothing_left
from tests.real_models import bart_g2p

START, END, UNKNOWN = 1, 2, 3
MAX_TOKENS = 40
KNOWN = {"tokenizer": "tˈOkənˌIzəɹ", "example": "ɪɡzˈæmpᵊl"}
WORDS = [
    *KNOWN, "a", "ox", "rhythm", "knight", "schedule", "Wednesday", "colonel", "photograph", "photography", "queue",
    "mother-in-law", "don't", "O'Brien", "naïve", "thoroughly", "antidisestablishmentarianism", "zzz",
]  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings = {"dtype": "float32", "device": "cpu", "num_threads": 1, "num_blocks": 400}
    with LLM(str(bart_g2p()), skip_tokenizer=True, **settings) as built:
        yield built
        check_nothing_left(built)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return BartForConditionalGeneration.from_pretrained(bart_g2p(), dtype=torch.float32).eval()


def spelled(llm: LLM, word: str) -> list[int]:
    """As the model's encoder reads it."""
    alphabet = llm.source.raw_config["grapheme_chars"]
    return [START, *(alphabet.index(letter) if letter in alphabet else UNKNOWN for letter in word), END]


def prompts_of(llm: LLM, words: list[str]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": spelled(llm, word)} for word in words]


def phonemes(llm: LLM, token_ids: list[int]) -> str:
    """The model says the start token once more, before the first of them."""
    assert (token_ids[0], token_ids[-1]) == (START, END)
    return "".join(llm.source.raw_config["phoneme_chars"][token] for token in token_ids[1:-1])


@torch.inference_mode()
def by_transformers(
    oracle: Any, ids: list[int], begun: tuple[int, ...] = (START,), max_tokens: int = MAX_TOKENS
) -> list[int]:
    found = oracle.generate(
        torch.tensor([ids]), decoder_input_ids=torch.tensor([begun]), do_sample=False, num_beams=1,
        max_new_tokens=max_tokens,
    )  # fmt: skip
    return found[0, len(begun) :].tolist()


@torch.inference_mode()
def beams_by_transformers(oracle: Any, ids: list[int], params: BeamSearchParams) -> list[Text]:
    found = oracle.generate(
        torch.tensor([ids]), do_sample=False, num_beams=params.beam_width, num_return_sequences=params.n,
        max_new_tokens=params.max_tokens, length_penalty=params.length_penalty, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    lengths = (found.beam_indices >= 0).sum(dim=1).tolist()
    rows = zip(found.sequences.tolist(), lengths, found.sequences_scores.tolist())
    return [Text(row[1 : 1 + length], score) for row, length, score in rows]


def test_words_are_spelled_as_they_are_known(llm: LLM) -> None:
    outputs = llm.generate(prompts_of(llm, list(KNOWN)), GREEDY, progress=False)
    assert [phonemes(llm, output.outputs[0].token_ids) for output in outputs] == list(KNOWN.values())
    assert [output.prompt_token_ids for output in outputs] == [[START]] * 2
    assert [output.encoder_prompt_token_ids for output in outputs] == [spelled(llm, word) for word in KNOWN]


def test_greedy_texts_are_those_of_transformers(llm: LLM, oracle: Any) -> None:
    outputs = llm.generate(prompts_of(llm, WORDS), GREEDY, progress=False)
    for word, output in zip(WORDS, outputs, strict=True):
        assert output.outputs[0].token_ids == by_transformers(oracle, spelled(llm, word)), word


@pytest.mark.parametrize("width", [2, 5])
def test_beams_are_those_of_transformers(llm: LLM, oracle: Any, width: int) -> None:
    params = BeamSearchParams(beam_width=width, n=width, max_tokens=MAX_TOKENS)
    outputs = llm.generate(prompts_of(llm, WORDS), params, progress=False)
    for word, output in zip(WORDS, outputs, strict=True):
        assert_same_texts(texts_of(output), beams_by_transformers(oracle, spelled(llm, word), params), word)


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_texts_that_are_cut_off_end_as_the_model_s_config_forces_them_to(
    llm: LLM, oracle: Any, max_tokens: int
) -> None:
    assert oracle.generation_config.forced_eos_token_id == END
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    beams = BeamSearchParams(beam_width=4, n=3, max_tokens=max_tokens, length_penalty=2.0)
    outputs = llm.generate(prompts_of(llm, WORDS), greedy, progress=False)
    searches = llm.generate(prompts_of(llm, WORDS), beams, progress=False) if max_tokens > 2 else []
    for word, output in zip(WORDS, outputs, strict=True):
        (choice,) = output.outputs
        assert choice.token_ids == by_transformers(oracle, spelled(llm, word), max_tokens=max_tokens), word
        if len(choice.token_ids) == max_tokens:
            assert (choice.token_ids[-1], choice.finish_reason) == (END, "length")
    for word, output in zip(WORDS, searches):
        assert_same_texts(texts_of(output), beams_by_transformers(oracle, spelled(llm, word), beams), word)
    free = SamplingParams(temperature=0.0, max_tokens=max_tokens, forced_eos_token_id=[])
    (output,) = llm.generate(prompts_of(llm, ["thoroughly"]), free, progress=False)
    assert output.outputs[0].token_ids[-1] != END


@pytest.mark.parametrize("with_start", [True, False], ids=["with the start token", "without"])
def test_a_decoder_prompt_is_gone_on_with(llm: LLM, oracle: Any, with_start: bool) -> None:
    begun = [llm.source.raw_config["phoneme_chars"].index(sound) for sound in "fətˈ"]
    encoder_prompt = {"prompt_token_ids": spelled(llm, "photography")}
    decoder_prompt = {"prompt_token_ids": [START, *begun] if with_start else begun}
    (output,) = llm.generate(
        [{"encoder_prompt": encoder_prompt, "decoder_prompt": decoder_prompt}], GREEDY, progress=False
    )
    assert output.prompt_token_ids == [START, *begun]
    expected = by_transformers(oracle, spelled(llm, "photography"), (START, *begun))
    assert len(expected) > 3 and output.outputs[0].token_ids == expected


def test_a_word_is_encoded_once_however_often_it_is_asked_for(llm: LLM) -> None:
    words = ["ratoon", "sprout", "ratoon"]
    beams = BeamSearchParams(beam_width=4, n=4, max_tokens=MAX_TOKENS)
    before = llm.stats().num_encoder_runs
    llm.generate(prompts_of(llm, words * 2), [GREEDY] * 3 + [beams] * 3, progress=False)
    llm.generate(prompts_of(llm, words), GREEDY, progress=False)
    assert llm.stats().num_encoder_runs - before == 2
