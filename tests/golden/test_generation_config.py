"""A model's generation config is obeyed: `LLM.generate(prompt)` gives what `generate` of transformers gives without
further arguments, greedily and with beams, and what explicit params leave open is the model's own."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ratoon import LLM, BeamSearchParams, SamplingParams
from tests.golden import encoder_engines, engines
from tests.golden.beam_oracle import Text, assert_same_texts, texts_of
from tests.golden.engines import check_nothing_left
from tests.golden.pressure import step_without_free_memory
from tests.golden.tiny_models import random_token_ids

LLAMA = "llama with grouped heads"
END = 2
INPUTS = [random_token_ids(length, seed=40 + length) for length in (3, 9, 16, 24)]
SEARCH = {"num_beams": 4, "no_repeat_ngram_size": 3, "min_length": 6, "max_length": 16, "forced_eos_token_id": END}

CONFIGS: dict[str, dict[str, Any]] = {
    "greedy with lengths": {"no_repeat_ngram_size": 2, "min_length": 6, "max_length": 16, "forced_eos_token_id": END},
    "greedy with words": {"max_new_tokens": 12, "encoder_no_repeat_ngram_size": 2, "do_sample": False},
    "greedy with a penalty": {"max_new_tokens": 9, "min_new_tokens": 4, "repetition_penalty": 1.4, "do_sample": False},
    "beams": {**SEARCH, "length_penalty": 2.0, "early_stopping": True},
    "beams that go on": {**SEARCH, "length_penalty": 2.0, "early_stopping": False},
    "beams to the end": {**SEARCH, "length_penalty": 0.5, "early_stopping": "never", "encoder_no_repeat_ngram_size": 2},
    "beams with a penalty": {**SEARCH, "repetition_penalty": 1.3, "early_stopping": True},
    "short beams": {"num_beams": 3, "no_repeat_ngram_size": 1, "length_penalty": -1.0, "max_new_tokens": 7},
}


def oracle_of(family: str) -> Any:
    tiny = engines.tiny_model(family) if family == LLAMA else encoder_engines.tiny_model(family)
    return copy.deepcopy(tiny.oracle)


def with_config(family: str, fields: dict[str, Any]) -> Any:
    """An oracle that ends at a token that its texts hold."""
    oracle = oracle_of(family)
    oracle.generation_config = GenerationConfig(pad_token_id=0, decoder_start_token_id=encoder_engines.START)
    shift = 1000 if family == LLAMA else 0  # a length counts the prompt of a model without an encoder
    texts = [by_transformers(oracle, prompt, max_new_tokens=12)[0].token_ids for prompt in INPUTS]
    tokens = [token for text in texts for token in set(text[3:])]
    end = max(set(tokens), key=lambda token: (tokens.count(token), -token))
    lengths = {name: 24 + value for name, value in fields.items() if shift and name in ("min_length", "max_length")}
    words = [text[place : place + 2] for text in texts for place in (1, 5)] + [[*INPUTS[0][-1:], texts[0][0]]]
    oracle.generation_config = GenerationConfig(
        pad_token_id=0, decoder_start_token_id=encoder_engines.START, eos_token_id=[end, END],
        bad_words_ids=words if "encoder_no_repeat_ngram_size" in fields else None, **(fields | lengths),
    )  # fmt: skip
    return oracle


@torch.inference_mode()
def by_transformers(oracle: Any, prompt: list[int], **settings: Any) -> list[Text]:
    ids = torch.tensor([prompt])
    if oracle.config.is_encoder_decoder:  # T5's own cache counts the encoder's layers
        settings["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
    found = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True, **settings
    )
    start = 1 if oracle.config.is_encoder_decoder else len(prompt)
    scores = getattr(found, "sequences_scores", None)
    if scores is None:
        return [Text(found.sequences[0, start:].tolist(), 0.0)]
    lengths = (found.beam_indices >= 0).sum(dim=1).tolist()
    rows = zip(found.sequences.tolist(), lengths, scores.tolist())
    return [Text(row[start : start + length], score) for row, length, score in rows]


@contextmanager
def engine(oracle: Any, **settings: Any) -> Iterator[LLM]:
    defaults = {"device": "cpu", "num_blocks": 200, "num_threads": 1, "max_num_seqs": 32, "skip_tokenizer": True}
    with tempfile.TemporaryDirectory(prefix="ratoon-golden-") as folder:
        oracle.save_pretrained(Path(folder))
        with LLM(folder, **(defaults | settings)) as llm:
            yield llm
            check_nothing_left(llm)


def cut(text: list[int], ends: list[int]) -> list[int]:
    """Without what transformers pads with."""
    place = next((place for place, token in enumerate(text) if token in ends), len(text))
    return text[: place + 1]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("family", ["bart", "t5", LLAMA])
@pytest.mark.one_in(11)
def test_a_call_without_params_does_what_the_config_says(family: str, name: str) -> None:
    oracle = with_config(family, CONFIGS[name])
    theirs = [by_transformers(oracle, prompt) for prompt in INPUTS]
    with engine(oracle) as llm:
        assert isinstance(llm.get_default_params(), BeamSearchParams) == ("num_beams" in CONFIGS[name])
        params = llm.get_default_params()
        if family == LLAMA and isinstance(params, SamplingParams):
            params.temperature = 0.0  # a silent file of a model without an encoder leaves sampling as it is
        outputs = llm.generate(INPUTS, None if family != LLAMA else params, progress=False)
    for prompt, output, their in zip(INPUTS, outputs, theirs, strict=True):
        if "num_beams" in CONFIGS[name]:
            assert_same_texts(texts_of(output), their, (prompt, name))
        else:
            assert list(output.outputs[0].token_ids) == cut(their[0].token_ids, oracle.generation_config.eos_token_id)


def test_the_token_that_begins_every_text_counts_in_its_length() -> None:
    oracle = with_config("bart", {**SEARCH, "length_penalty": 2.0, "early_stopping": "never", "min_length": 0})
    oracle.generation_config.forced_bos_token_id = 11
    with engine(oracle) as llm:
        outputs = llm.generate(INPUTS, progress=False)
    for prompt, output in zip(INPUTS, outputs, strict=True):
        (their,) = by_transformers(oracle, prompt)
        assert output.prompt_token_ids == [encoder_engines.START, 11] == [encoder_engines.START, their.token_ids[0]]
        assert_same_texts(texts_of(output), [Text(their.token_ids[1:], their.score)], prompt)


def test_explicit_params_keep_the_model_s_rules_unless_they_say_otherwise() -> None:
    rules = {"no_repeat_ngram_size": 2, "forced_eos_token_id": END}
    oracle = with_config("bart", {**rules, "num_beams": 4, "min_length": 9, "max_length": 20})
    prompt, ends = INPUTS[1], oracle.generation_config.eos_token_id
    plain = {"num_beams": 1, "min_length": 0, "max_new_tokens": 8}
    without = {"no_repeat_ngram_size": 0, "forced_eos_token_id": None}
    with engine(oracle) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8)
        free = SamplingParams(temperature=0, max_tokens=8, no_repeat_ngram_size=0, forced_eos_token_id=[])
        beams = BeamSearchParams(beam_width=3, n=3, max_tokens=8)
        kept, freed, searched = llm.generate([prompt] * 3, [greedy, free, beams], progress=False)
    assert list(kept.outputs[0].token_ids) == cut(by_transformers(oracle, prompt, **plain)[0].token_ids, ends)
    search = {"num_beams": 3, "num_return_sequences": 3, "min_length": 0, "max_new_tokens": 8}
    assert_same_texts(texts_of(searched), by_transformers(oracle, prompt, **search), prompt)
    for name, value in without.items():
        setattr(oracle.generation_config, name, value)
    assert list(freed.outputs[0].token_ids) == cut(by_transformers(oracle, prompt, **plain)[0].token_ids, ends)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_rules_outlive_the_loss_of_memory(num_tokens: int) -> None:
    oracle = with_config("bart", {**SEARCH, "length_penalty": 2.0, "early_stopping": "never", "min_length": 15})
    prompt = INPUTS[1]
    with engine(oracle, block_size=1) as llm:  # every token needs a block
        search = llm.stream(prompt, llm.get_default_beam_search_params())
        found = [next(search) for _ in range(num_tokens)]
        assert step_without_free_memory(llm)
        found += search
        sampling = llm.stream(prompt)
        pieces = [next(sampling) for _ in range(num_tokens)]
        assert step_without_free_memory(llm)
        pieces += sampling
    assert_same_texts(texts_of(found[-1]), by_transformers(oracle, prompt), prompt)
    greedy = by_transformers(oracle, prompt, num_beams=1)[0].token_ids
    assert [token for piece in pieces for token in piece.outputs[0].token_ids] == greedy


def test_choices_and_continuations_see_the_whole_text() -> None:
    oracle = oracle_of(LLAMA)
    oracle.generation_config = GenerationConfig(pad_token_id=0)
    prompt = INPUTS[2]
    with engine(oracle) as llm:
        free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=3)
        ruled = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, n=3, no_repeat_ngram_size=2)
        (parent,) = llm.generate([prompt], free, progress=False)
        child = llm.generate_continuation(parent, [], ruled)
    whole = [*prompt, *parent.outputs[0].token_ids]
    settings = {"max_new_tokens": 6, "no_repeat_ngram_size": 2, "eos_token_id": None}
    (their,) = by_transformers(oracle, whole, **settings)
    assert [list(choice.token_ids) for choice in child.outputs] == [their.token_ids] * 3
