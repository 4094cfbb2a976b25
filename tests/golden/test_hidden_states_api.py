"""Hidden states as callers in Python get them: by `LLM.hidden_states` and by `return_hidden_states`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from ratoon import HiddenStatesParams, RequestOutput
from ratoon.core.params import BeamSearchParams, SamplingParams
from tests.depths import both_depths
from tests.golden.engines import ENGINE_FAMILIES, engine
from tests.golden.hidden_oracle import TOLERANCE, num_layers, oracle_states
from tests.golden.tiny_models import random_token_ids

LLAMA = "llama with grouped heads"
EVERYTHING = HiddenStatesParams(positions="all", layers="all")
PROMPTS = [random_token_ids(length, seed=length) for length in (1, 16, 17, 40)]


def assert_right(
    tensor: torch.Tensor, family: str, token_ids: Sequence[int], layers: object, positions: object
) -> None:
    expected = oracle_states(family, token_ids)[layers][:, positions]
    np.testing.assert_allclose(tensor.numpy(), expected, atol=TOLERANCE, rtol=0)


def whole(output: RequestOutput, choice: int = 0) -> list[int]:
    assert output.prompt_token_ids is not None
    return [*output.prompt_token_ids, *output.outputs[choice].token_ids]


@pytest.mark.parametrize("family", ENGINE_FAMILIES)
@pytest.mark.one_in(3)
def test_all_states_of_prompts_and_of_what_was_generated_behind_them(family: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    with engine(family) as llm:
        everything = slice(None)
        entries = [*range(num_layers(family)), num_layers(family) + 1]  # transformers' own, the last behind the norm
        for prompt, found in zip(PROMPTS, llm.extract_hidden_states(PROMPTS, EVERYTHING, progress=False), strict=True):
            assert_right(found.tensor, family, prompt, entries, everything)
            assert found.token_ids == prompt
        outputs = llm.generate(PROMPTS, params, retain_kv=60, progress=False)
        for output, found in zip(outputs, llm.extract_hidden_states(outputs, EVERYTHING, progress=False), strict=True):
            assert_right(found.tensor, family, whole(output), entries, everything)
            assert found.token_ids == whole(output)
        for output, found in zip(outputs, llm.extract_hidden_states(outputs, progress=False), strict=True):
            assert_right(found.tensor, family, whole(output), entries[-1:], [-1])
            assert found.computed_tokens == 1
        llm.reset_prefix_cache()


def test_rows_and_layers_come_in_the_order_in_which_they_were_asked_for() -> None:
    prompt = PROMPTS[3]
    params = HiddenStatesParams(positions=[-1, 3, [7, 10], 3, -40], layers=["norm", 0, "pre_norm", -1])
    with engine(LLAMA) as llm:
        found = llm.extract_hidden_states(prompt, params, progress=False)
    assert found.positions == [39, 3, 7, 8, 9, 3, 0]
    assert_right(found.tensor, LLAMA, prompt, [4, 0, 3, 4], found.positions)


@both_depths
@pytest.mark.parametrize("family", [LLAMA, "qwen2 with windows by layer type", "gpt2"])
@pytest.mark.parametrize("kind", ["sampled", "beams"])
def test_texts_that_come_with_their_states(family: str, kind: str) -> None:
    asked = HiddenStatesParams(positions="all", scope="output", layers=[1, "norm"])
    params: SamplingParams | BeamSearchParams = SamplingParams(
        temperature=1.0, seed=3, n=3, max_tokens=6, ignore_eos=True, return_hidden_states=asked
    )
    if kind == "beams":
        params = BeamSearchParams(beam_width=4, n=3, max_tokens=6, ignore_eos=True, return_hidden_states=asked)
    with engine(family) as llm:
        outputs = llm.generate(PROMPTS, params, progress=False)
        for output in outputs:
            assert output.hidden_states is not None and len(output.hidden_states) == 3
            for choice, found in enumerate(output.hidden_states):
                sequence = whole(output, choice)
                assert_right(found.tensor, family, sequence, [1, num_layers(family) + 1], found.positions)
                assert found.positions == list(range(len(output.prompt_token_ids), len(sequence)))
        plain = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=6, ignore_eos=True)
        if kind == "sampled":  # and the texts are those without
            assert [whole(output) for output in outputs] == [
                whole(output) for output in llm.generate(PROMPTS, plain, progress=False)
            ]
