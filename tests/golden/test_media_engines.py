"""Engines of models that read images, from folders that transformers saved: prompts of text give its tokens, on one
worker and on several, and the encoder is loaded beside."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.engines import engine_of_folder, greedy, run, write_word_tokenizer
from tests.golden.tiny_media_models import FAMILIES, TinyMediaModel

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], list(range(20, 60))]
COUNT = 8


@functools.cache
def tiny_model(family: str) -> TinyMediaModel:
    return FAMILIES[family]()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family in FAMILIES:
        found[family] = folder = tmp_path_factory.mktemp(family)
        tiny_model(family).oracle.save_pretrained(folder)
        write_word_tokenizer(folder)
    return found


@torch.inference_mode()
def oracle_tokens(tiny: TinyMediaModel, prompt: list[int]) -> list[int]:
    """Greedy tokens, each from the whole sequence."""
    tokens = list(prompt)
    for _ in range(COUNT):
        tokens.append(int(tiny.oracle(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *[(family, {}) for family in FAMILIES],
        pytest.param("qwen2_5_vl", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen2_vl", {"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("gemma3", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("gemma3", {"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_text_gives_the_tokens_of_transformers(
    folders: dict[str, Path], family: str, settings: dict[str, Any]
) -> None:  # fmt: skip
    expected = [oracle_tokens(tiny_model(family), prompt) for prompt in PROMPTS]
    with engine_of_folder(folders[family], **settings) as llm:
        found = [list(output.outputs[0].token_ids) for output in run(llm, PROMPTS, greedy(COUNT))]
        worker = getattr(llm._client.core.executor, "_worker", None)
        assert worker is None or worker.runner.model.media_encoder is not None
    assert found == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_models_answer(folders: dict[str, Path], family: str) -> None:
    with engine_of_folder(folders[family], quantization="int8") as llm:
        assert all(len(output.outputs[0].token_ids) == COUNT for output in run(llm, PROMPTS, greedy(COUNT)))
