"""Weights of cross-attention that requests read are those of transformers, of every head, in any batch and after any
cut into steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from ratoon import HiddenStatesParams
from ratoon.core.errors import RequestError
from ratoon.core.request import EngineCoreRequest, Extraction
from tests.golden.encoder_engines import Driver, Source, core_of, decoder_prompt, greedy, source_of, tiny_model
from tests.golden.test_encoder_decoder_api import SOURCES, engine

TOLERANCE = 1e-5  # weights are at most 1
ALL_HEADS = [(layer, head) for layer in range(3) for head in range(4)]


@contextmanager
def eager(family: str) -> Iterator[torch.nn.Module]:
    """The oracle, with an attention that gives its weights."""
    oracle = tiny_model(family).oracle
    before = oracle.config._attn_implementation
    oracle.set_attn_implementation("eager")
    try:
        yield oracle
    finally:
        oracle.set_attn_implementation(before)


def weights_by_transformers(family: str, source: Source, tokens: Sequence[int]) -> np.ndarray:
    """[layers, heads, T, encoder positions]"""
    name = "input_ids" if source.audio_seed is None else "input_features"
    with eager(family) as oracle, torch.inference_mode():
        found = oracle(
            **{name: source.for_oracle()}, decoder_input_ids=torch.tensor([list(tokens)]), output_attentions=True
        )
    return torch.cat(found.cross_attentions).numpy()


def ask_weights(
    driver: Driver, name: str, source: Source, tokens: list[int], positions: list[int], heads: list[tuple[int, int]]
) -> None:
    layers, numbers = [layer for layer, _ in heads], [head for _, head in heads]
    extraction = Extraction(positions, layers, cross_heads=numbers)
    prompt = tokens[: positions[-1] + 1]
    driver.add(EngineCoreRequest(name, prompt, extraction, encoder_input=source.for_engine()))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("family", ["whisper", "bart"])
@pytest.mark.one_in(3)
def test_weights_of_all_heads_of_inputs_of_several_lengths_in_one_batch(family: str, backend: str) -> None:
    asked = [(source_of(family, length), decoder_prompt(count)) for length, count in ((60, 40), (17, 9), (1, 1))]
    with core_of(family, attention_backend=backend, max_num_batched_tokens=200) as driver:
        for number, (source, tokens) in enumerate(asked):
            ask_weights(driver, f"{number}", source, tokens, [*range(len(tokens))], ALL_HEADS)
        driver.ask("text", asked[0][0], asked[0][1], greedy(8))  # beside them, and not changed
        driver.run()
        for number, (source, tokens) in enumerate(asked):
            expected = weights_by_transformers(family, source, tokens)
            found = driver[f"{number}"].states
            assert found.shape == (12, len(tokens), source.num_positions)
            np.testing.assert_allclose(found, expected.reshape(found.shape), atol=TOLERANCE)
        alone = driver.tokens("text")
    with core_of(family, attention_backend=backend) as driver:
        driver.ask("text", asked[0][0], asked[0][1], greedy(8))
        driver.run()
        assert driver.tokens("text") == alone


def test_some_heads_and_positions_in_small_steps_after_a_text_has_filled_the_cache() -> None:
    """The encoder does not run again, and keys and values of the text are not computed again."""
    source, prompt = source_of("whisper", 5), decoder_prompt(20)
    heads = [(2, 3), (0, 1)]
    with core_of("whisper", max_num_batched_tokens=16) as driver:
        driver.ask("text", source, prompt, greedy(30))
        driver.run()
        tokens = [*prompt, *driver.tokens("text")]
        positions = [20, 21, 22, 40, 48]
        ask_weights(driver, "weights", source, tokens, positions, heads)
        driver.run()
        expected = weights_by_transformers("whisper", source, tokens)
        for plane, (layer, head) in zip(driver["weights"].states, heads, strict=True):
            np.testing.assert_allclose(plane, expected[layer, head, positions], atol=TOLERANCE)
        assert driver.num_encoder_runs == 1
        assert driver["weights"].num_rows_run <= len(positions) + 2 + 16  # the last block was not full


def test_the_api_gives_weights_of_a_prompt_and_of_an_earlier_request() -> None:
    source, prompt = SOURCES[2], decoder_prompt(6)
    with engine("bart") as llm:
        given = {
            "encoder_prompt": {"prompt_token_ids": list(source.token_ids)},
            "decoder_prompt": {"prompt_token_ids": prompt},
        }
        (output,) = llm.generate(given, greedy(5), progress=False)
        tokens = [*prompt, *output.outputs[0].token_ids]
        params = HiddenStatesParams(positions=[-1, [2, 5]], cross_heads=[[1, 2], (0, 0)])
        of_text = llm.extract_hidden_states(output, params)
        of_prompt = llm.extract_hidden_states(given, params)
        expected = weights_by_transformers("bart", source, tokens)
        for found, last in ((of_text, len(tokens) - 1), (of_prompt, len(prompt) - 1)):
            assert found.positions == [last, 2, 3, 4] and found.layers == [1, 0]
            wanted = np.stack([expected[1, 2, found.positions], expected[0, 0, found.positions]])
            np.testing.assert_allclose(found.tensor.numpy(), wanted, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("fields", "field", "problem"),
    [
        ({"cross_heads": [[3, 0]]}, "cross_heads[0]", "[3, 0] is out of range"),
        ({"cross_heads": [[0, 0], [1, 4]]}, "cross_heads[1]", "[1, 4] is out of range"),
        ({"cross_heads": [[0, -1]]}, "cross_heads[0]", "[0, -1] is out of range"),
        ({"cross_heads": []}, "cross_heads", "is empty"),
        ({"cross_heads": [[1]]}, "cross_heads[0]", "[1] is no pair of whole numbers"),
        ({"cross_heads": [[0, 1], (0, 1)]}, "cross_heads", "names a head twice"),
        ({"cross_heads": [[0, 1]], "side": "encoder"}, "cross_heads", "only a decoder attends to an encoder"),
        ({"cross_heads": [[0, 1]], "layers": 1}, "layers", "has no meaning with cross_heads"),
        ({"cross_heads": [[0, 1]], "lens": 1}, "lens", "has no meaning with cross_heads"),
    ],
)
def test_heads_that_can_not_be_read_are_refused_by_name(fields: dict, field: str, problem: str) -> None:
    from ratoon.engine.input.hidden_states import HiddenStatesSelector

    with pytest.raises(RequestError) as raised:
        HiddenStatesSelector(tiny_model("whisper").config).verify(HiddenStatesParams(**fields))
    assert (raised.value.field, raised.value.problem) == (field, problem)


def test_models_without_an_encoder_and_pipelines_have_no_weights_to_read() -> None:
    from dataclasses import replace

    from ratoon.engine.input.hidden_states import HiddenStatesSelector

    config, params = tiny_model("whisper").config, HiddenStatesParams(cross_heads=[[0, 0]])
    with pytest.raises(RequestError, match="cross_heads: the model has no encoder"):
        HiddenStatesSelector(replace(config, encoder=None)).verify(params)
    with pytest.raises(RequestError, match="cross_heads: are not read from a pipeline"):
        HiddenStatesSelector(config, num_stages=2).verify(params)
