"""Models with an encoder as callers in Python get them: prompts in, texts and states of both sides back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ratoon import LLM, HiddenStatesParams, RequestError, SamplingParams
from tests.golden.tiny_encoder_models import random_features, tiny_bart, tiny_bert, tiny_t5, tiny_whisper
from tests.golden.tiny_models import TinyModel, random_token_ids

TOLERANCE = 1e-4
NUM_TOKENS = 12
START = 3
IDS = random_token_ids(21, seed=1)
FAMILIES: dict[str, tuple[Callable[[], TinyModel], Any]] = {
    "bart": (tiny_bart, IDS),
    "t5": (tiny_t5, IDS),
    "whisper": (tiny_whisper, {"features": random_features(seed=1)}),
}


def open_llm(tiny: TinyModel, folder: Path) -> LLM:
    tiny.oracle.save_pretrained(folder)
    return LLM(str(folder), skip_tokenizer=True, num_blocks=64, num_threads=1)


def encoder_arguments(prompt: Any) -> dict[str, torch.Tensor]:
    if isinstance(prompt, dict):
        return {"input_features": prompt["features"][None]}
    return {"input_ids": torch.tensor([prompt])}


@torch.inference_mode()
def oracle_states(tiny: TinyModel, prompt: Any, decoder_ids: list[int]) -> tuple[list[torch.Tensor], ...]:
    decoder = {"decoder_input_ids": torch.tensor([decoder_ids])}
    found = tiny.oracle(**encoder_arguments(prompt), **decoder, output_hidden_states=True, use_cache=False)
    return [states[0] for states in found.encoder_hidden_states], [states[0] for states in found.decoder_hidden_states]


@torch.inference_mode()
def oracle_tokens(tiny: TinyModel, prompt: Any, decoder_ids: list[int]) -> list[int]:
    """Greedy, one forward pass a token: what `generate` adds for each family is none of this test's business."""
    token_ids = list(decoder_ids)
    for _ in range(NUM_TOKENS):
        decoder = {"decoder_input_ids": torch.tensor([token_ids])}
        logits = tiny.oracle(**encoder_arguments(prompt), **decoder, use_cache=False).logits
        token_ids.append(int(logits[0, -1].argmax()))
    return token_ids[len(decoder_ids) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_single_prompts_pairs_and_continuations_say_what_transformers_says(family: str, tmp_path: Path) -> None:
    make, prompt = FAMILIES[family]
    tiny, params = make(), SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with open_llm(tiny, tmp_path) as llm:
        prompts = [prompt, {"encoder_prompt": prompt, "decoder_prompt": [9, 8]}]
        alone, pair = llm.generate(prompts, params, progress=False)
        child = llm.generate_continuation(pair, [7, 6], params)
        assert llm.stats().num_encoder_runs == 1
    assert alone.prompt_token_ids == [START] and pair.prompt_token_ids == [START, 9, 8]
    for output in (alone, pair, child):
        assert output.outputs[0].token_ids == oracle_tokens(tiny, prompt, output.prompt_token_ids)
        assert output.encoder_prompt_token_ids == (None if family == "whisper" else IDS)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_both_sides_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    make, prompt = FAMILIES[family]
    tiny, pair = make(), {"encoder_prompt": prompt, "decoder_prompt": [START, 9, 8, 7]}
    with open_llm(tiny, tmp_path) as llm:
        for side, expected in zip(("encoder", "decoder"), oracle_states(tiny, prompt, [START, 9, 8, 7])):
            num_layers = len(expected) - 1
            layers = [*range(num_layers), "norm"]  # the last of transformers' has passed the final norm
            some = HiddenStatesParams(side=side, positions=[-1, [0, 3]], layers=layers)
            found = llm.extract_hidden_states(pair, some, progress=False)
            for states, wanted in zip(found.tensor, expected, strict=True):
                rows = wanted[[len(wanted) - 1, 0, 1, 2]]
                torch.testing.assert_close(states, rows, atol=TOLERANCE, rtol=0)


def test_where_every_token_sees_all_states_do_not_depend_on_what_was_asked_for(tmp_path: Path) -> None:
    tiny = tiny_bert()
    with open_llm(tiny, tmp_path) as llm:
        found = llm.extract_hidden_states(IDS, HiddenStatesParams(positions=[2, 0], layers="all"), progress=False)
        with pytest.raises(RequestError, match="model: has no decoder"):
            llm.generate(IDS)
    with torch.inference_mode():
        expected = tiny.oracle(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    for states, wanted in zip(found.tensor, expected):
        torch.testing.assert_close(states, wanted[0, [2, 0]], atol=TOLERANCE, rtol=0)
    assert found.token_ids == [IDS[2], IDS[0]]
