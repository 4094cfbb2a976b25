"""Encoders and heads that classify: states and logits are those of transformers, in batches of any lengths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ratoon import LLM, PoolingParams, RequestError
from tests.golden.engines import check_nothing_left
from tests.golden.marks import exact_on_cpu
from tests.golden.tiny_classifiers import ENCODERS, save_model
from tests.golden.tiny_models import MAX_POSITION, VOCAB_SIZE, random_token_ids

TOLERANCE = 1e-4
SETTINGS: dict[str, Any] = {"device": "cpu", "num_blocks": 96, "num_threads": 1, "skip_tokenizer": True}
# Around the borders of blocks, and the longest that there can be. Ids from 6 on: lower ones are padding somewhere,
# which transformers does not count as a position.
PROMPTS = [
    [6 + token % (VOCAB_SIZE - 6) for token in random_token_ids(length, seed=length)]
    for length in (1, 2, 15, 17, 33, 70, MAX_POSITION)
]
LOGITS = PoolingParams(classify=True, activation="none")
CLASSIFIERS = [
    "BertForSequenceClassification", "RobertaForSequenceClassification", "XLMRobertaForSequenceClassification",
    "DistilBertForSequenceClassification", "ModernBertForSequenceClassification", "LlamaForSequenceClassification",
    "Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification",
]  # fmt: skip


def answers(llm: LLM, prompts: Sequence[Any], params: PoolingParams) -> list[np.ndarray]:
    outputs = llm.embed(list(prompts), params, progress=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.embedding for output in outputs]


@torch.inference_mode()
def oracle(model: Any, prompt: Sequence[int], **more: Any) -> Any:
    return model(torch.tensor([list(prompt)]), **more)


@pytest.mark.parametrize("family", ENCODERS)
def test_states_of_encoders_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, f"{family}Model")
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for kind in ("mean", "first"):
            found = answers(llm, PROMPTS, PoolingParams(pooling=kind, normalize=False))
            for prompt, vector in zip(PROMPTS, found, strict=True):
                states = oracle(model, prompt).last_hidden_state[0].numpy()
                expected = states.mean(axis=0) if kind == "mean" else states[0]
                np.testing.assert_allclose(vector, expected, atol=TOLERANCE, rtol=0, err_msg=f"{kind} {len(prompt)}")
        check_nothing_left(llm)


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_logits_of_heads_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, architecture, num_labels=3)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for prompt, logits in zip(PROMPTS, answers(llm, PROMPTS, LOGITS), strict=True):
            expected = oracle(model, prompt).logits[0].numpy()
            np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=1e-5, err_msg=str(len(prompt)))
        check_nothing_left(llm)


def test_a_head_may_read_the_mean_of_states(tmp_path: Path) -> None:
    more = {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True, "mlp_bias": True,
            "attention_bias": True}  # fmt: skip
    model = save_model(tmp_path, "ModernBertForSequenceClassification", num_labels=1, **more)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for prompt, logits in zip(PROMPTS, answers(llm, PROMPTS, LOGITS), strict=True):
            np.testing.assert_allclose(logits, oracle(model, prompt).logits[0], atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "Qwen3ForSequenceClassification"])
def test_quantised_weights_give_nearly_the_same_logits(architecture: str, tmp_path: Path) -> None:
    save_model(tmp_path, architecture, num_labels=4, gain=1.0)
    found = {}
    for weight_format in ("float", "int8"):
        with LLM(str(tmp_path), **SETTINGS, quantization=None if weight_format == "float" else weight_format) as llm:
            found[weight_format] = np.stack(answers(llm, PROMPTS, LOGITS))
    difference = np.abs(found["float"] - found["int8"]).max()
    assert 0 < difference < 0.1 * np.abs(found["float"]).max()


@exact_on_cpu
@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "ModernBertForSequenceClassification"])
def test_neighbours_change_no_bit(architecture: str, tmp_path: Path) -> None:
    save_model(tmp_path, architecture, num_labels=2)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        together = answers(llm, PROMPTS, LOGITS)
        alone = [answers(llm, [prompt], LOGITS)[0] for prompt in PROMPTS]
    assert [one.tobytes() for one in together] == [one.tobytes() for one in alone]


def test_labels_and_vectors_may_be_asked_for_in_one_batch(tmp_path: Path) -> None:
    model = save_model(tmp_path, "BertForSequenceClassification", num_labels=3)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        params = [LOGITS, PoolingParams(pooling="first", normalize=False), PoolingParams(classify=True)]
        logits, vector, probabilities = (
            output.embedding for output in llm.embed([PROMPTS[3]] * 3, params, progress=False)
        )
    expected = oracle(model, PROMPTS[3])
    np.testing.assert_allclose(logits, expected.logits[0], atol=TOLERANCE)
    np.testing.assert_allclose(probabilities, expected.logits[0].softmax(0), atol=TOLERANCE)
    assert vector.shape == (64,)


def test_tokens_of_a_pair_have_types(tmp_path: Path) -> None:
    model = save_model(tmp_path, "BertForSequenceClassification", num_labels=1)
    prompts, types = PROMPTS[3:6], [[0] * (len(prompt) // 2) + [1] * (-(-len(prompt) // 2)) for prompt in PROMPTS[3:6]]
    typed = [{"prompt_token_ids": ids, "token_type_ids": kinds} for ids, kinds in zip(prompts, types)]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for found, ids, kinds in zip(answers(llm, typed, LOGITS), prompts, types):
            expected = oracle(model, ids, token_type_ids=torch.tensor([kinds])).logits[0]
            np.testing.assert_allclose(found, expected, atol=TOLERANCE)
        with pytest.raises(RequestError, match=r"token_type_ids\[0\]: 2 is no type of the model's tokens; 0 to 1"):
            llm.embed({"prompt_token_ids": [7], "token_type_ids": [2]}, progress=False)
        with pytest.raises(RequestError, match="token_type_ids"):
            llm.embed({"prompt_token_ids": [7, 8], "token_type_ids": [0]}, progress=False)


def test_a_head_that_classifies_generates_nothing(tmp_path: Path) -> None:
    save_model(tmp_path, "Qwen3ForSequenceClassification", num_labels=1)
    problem = "has no head over its vocabulary: it serves embeddings, labels"
    with LLM(str(tmp_path), **SETTINGS) as llm, pytest.raises(RequestError, match=problem):
        llm.generate([[5, 6, 7]], progress=False)


def test_a_model_without_such_a_head_says_what_it_can(tmp_path: Path) -> None:
    save_model(tmp_path, "BertModel")
    with (
        LLM(str(tmp_path), **SETTINGS) as llm,
        pytest.raises(RequestError, match="no head that classifies: it gives v"),
    ):
        llm.embed(PROMPTS[0], PoolingParams(classify=True), progress=False)


# ---- vectors of decoders ----


def test_a_decoder_that_was_trained_for_vectors_needs_no_head(tmp_path: Path) -> None:
    """As Qwen3-Embedding is stored: the class of a model that generates, tensors of one without a head."""
    model = save_model(tmp_path, "Qwen3Model")
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    modules = [{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for prompt, vector in zip(PROMPTS, answers(llm, PROMPTS, PoolingParams(normalize=False)), strict=True):
            expected = oracle(model, prompt).last_hidden_state[0, -1]
            np.testing.assert_allclose(vector, expected, atol=TOLERANCE, rtol=0)
        assert llm.source.config.matryoshka == ()
        with pytest.raises(RequestError, match="generates nothing"):
            llm.generate([[5, 6, 7]], progress=False)
