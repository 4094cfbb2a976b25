"""Decoders that run through the Transformers library answer as the library alone does, whatever the engine does with
them: batches, chunks, prefixes, continuations, beams, preemption, hidden states, adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ratoon import LLM, BeamSearchParams, ConfigError, HiddenStatesParams, ModelError, SamplingParams
from ratoon.core.outputs import RequestOutput
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.build import build_model
from ratoon.models.source import resolve_model
from ratoon.models.transformers_model import TransformersModel
from tests.adapter_folders import write_adapter
from tests.golden.beam_oracle import assert_same_texts, oracle_search, texts_of
from tests.golden.dense_step import dense_logits
from tests.golden.engines import engine_of_folder, greedy, run, tokens_of
from tests.golden.grammar_engines import json_tokenizer
from tests.golden.library_models import (
    MODELS,
    greedy_tokens,
    library_folder,
    library_model,
    library_states,
    oracle_logprobs,
)
from tests.golden.tiny_models import random_token_ids

PROMPTS = [random_token_ids(length, seed=length) for length in (33, 1, 18)]
COUNT = 24
TOLERANCE = 1e-4
CPU = torch.device("cpu")


@contextmanager
def engine(name: str, **settings: Any) -> Iterator[LLM]:
    """An engine whose model runs through the library, in steps of few tokens: prompts are computed in chunks."""
    chosen = {"model_backend": "transformers", "max_num_batched_tokens": 24}
    with engine_of_folder(library_folder(name), **(chosen | settings)) as llm:
        assert isinstance(model_of(llm), TransformersModel)
        yield llm


def model_of(llm: LLM) -> Any:
    return llm._client.core.executor._worker.runner.program.model


def check_logprobs(name: str, outputs: list[RequestOutput]) -> None:
    for output in outputs:
        prompt, answer = list(output.prompt_token_ids or []), list(output.outputs[0].token_ids)
        wanted = oracle_logprobs(name, prompt + answer)
        assert output.outputs[0].logprobs is not None
        for place, (row, token) in enumerate(zip(output.outputs[0].logprobs, answer, strict=True), len(prompt)):
            assert abs(row[token].logprob - float(wanted[place - 1, token])) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(5)
def test_answers_in_a_batch_and_behind_cached_prefixes_are_those_of_the_library(name: str) -> None:
    expected = [greedy_tokens(name, prompt, COUNT) for prompt in PROMPTS]
    with engine(name) as llm:
        outputs = run(llm, PROMPTS, greedy(COUNT, logprobs=2))
        assert tokens_of(outputs) == expected
        check_logprobs(name, outputs)
        again = run(llm, PROMPTS[:1], greedy(COUNT))
        assert again[0].num_cached_tokens == 32
        assert tokens_of(again) == expected[:1]
        suffix = random_token_ids(3, seed=50)
        child = llm.generate_continuation(outputs[2], suffix, greedy(6))
        text = [*PROMPTS[2], *expected[2], *suffix]
        assert list(child.outputs[0].token_ids) == greedy_tokens(name, text, 6)


@pytest.mark.parametrize("name", ["opt", "cohere2", "phimoe", "qwen3"])
def test_hidden_states_of_all_layers_are_those_of_the_library(name: str) -> None:
    with engine(name) as llm:
        params = HiddenStatesParams(layers="all", positions="all")
        (found,) = llm.extract_hidden_states([PROMPTS[0]], params, progress=False)
        wanted = library_states(name, PROMPTS[0])
        np.testing.assert_allclose(found.tensor.numpy(), wanted.numpy(), atol=TOLERANCE, rtol=0)
        first = HiddenStatesParams(layers=[1], positions=[-1])  # the pass ends behind the first layer
        (found,) = llm.extract_hidden_states([PROMPTS[0]], first, progress=False)
        np.testing.assert_allclose(found.tensor[0].numpy(), wanted[1, -1:].numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["opt", "exaone4"])
def test_beams_are_those_of_the_library(name: str) -> None:
    params = BeamSearchParams(beam_width=4, n=4, max_tokens=10, ignore_eos=True)
    with engine(name) as llm:
        for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, [params] * len(PROMPTS), progress=False)):
            assert_same_texts(texts_of(output), oracle_search(library_model(name), prompt, params, None), prompt)


@pytest.mark.parametrize("name", ["stablelm", "vaultgemma"])
def test_preempted_requests_end_with_the_tokens_they_would_have_had(name: str) -> None:
    num_groups = 2 if name == "vaultgemma" else 1
    with engine(name, num_blocks=1 + 7 * num_groups, max_steps_in_flight=1) as llm:
        outputs = run(llm, PROMPTS, greedy(40))
        assert llm.stats().num_preemptions > 0
    assert tokens_of(outputs) == [greedy_tokens(name, prompt, 40) for prompt in PROMPTS]


def test_choices_of_one_prompt_are_those_of_their_seeds_alone() -> None:
    params = SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=8, ignore_eos=True)
    with engine("arcee") as llm:
        (together,) = llm.generate([PROMPTS[0]], params, progress=False)
        llm.reset_prefix_cache()
        beside = run(llm, PROMPTS, params)
        assert [choice.token_ids for choice in together.outputs] == [choice.token_ids for choice in beside[0].outputs]
        assert len({tuple(choice.token_ids) for choice in together.outputs}) > 1


def test_structured_output_has_the_form_that_was_asked_for(tmp_path: Path) -> None:
    for path in library_folder("helium").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    json_tokenizer().save(str(tmp_path / "tokenizer.json"))
    params = SamplingParams(structured_output={"regex": "[ab]{3}[0-9]"}, temperature=1.0, seed=1, max_tokens=9)
    with engine_of_folder(tmp_path, skip_tokenizer=False) as llm:
        for output in llm.generate(["hello", "abc"], params, progress=False):
            assert re.fullmatch("[ab]{3}[0-9]", output.outputs[0].text)


def test_a_native_family_gives_the_same_numbers_through_the_library() -> None:
    folder, token_ids = str(library_folder("qwen3")), random_token_ids(40)
    native, library = (resolve_model(folder, backend=backend) for backend in ("native", "transformers"))
    assert native.config.library is None and library.config.library is not None
    same = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position")
    assert [getattr(native.config, field) for field in same] == [getattr(library.config, field) for field in same]
    found = [
        dense_logits(build_model(one.config, one.tensors, TorchOps(), CPU, torch.float32), token_ids)
        for one in (native, library)
    ]
    torch.testing.assert_close(found[0], found[1], atol=TOLERANCE, rtol=0)


def test_what_the_engine_cannot_do_with_such_a_model_is_refused_by_name() -> None:
    folder = str(library_folder("arcee"))
    for field in ("tensor_parallel_size", "pipeline_parallel_size"):
        with pytest.raises(ConfigError, match=f"{field}: 2 ranks can't share ArceeForCausalLM"):
            LLM(folder, **{field: 2}, device="cpu", num_blocks=16, skip_tokenizer=True)
    with pytest.raises(ModelError, match="not supported"):
        LLM(folder, model_backend="native", device="cpu", skip_tokenizer=True)


def test_files_that_do_not_fit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for path in library_folder("arcee").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    missing = "model.layers.1.mlp.up_proj.weight"
    for changed, problem in (
        ({name: one for name, one in tensors.items() if name != missing}, f"tensor '{missing}' is missing"),
        ({**tensors, "model.layers.1.extra.weight": torch.zeros(2)}, "no place for: model.layers.1.extra.weight"),
        ({**tensors, missing: torch.zeros(3, 4)}, r"has shape \(3, 4\)"),
    ):
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        source = resolve_model(str(tmp_path))
        with pytest.raises(ModelError, match=problem):
            build_model(source.config, source.tensors, TorchOps(), CPU, torch.float32)


def test_an_adapter_changes_answers_as_it_does_in_a_native_model(tmp_path: Path) -> None:
    folder = library_folder("qwen3")
    adapter = write_adapter(tmp_path, resolve_model(str(folder)).tensors.shapes())
    found = []
    for backend in ("native", "transformers"):
        settings = {"model_backend": backend, "adapters": {"one": str(adapter)}, "max_loras": 1, "max_lora_rank": 4}
        with engine_of_folder(folder, **settings) as llm:
            requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            outputs = llm.generate(requests, greedy(8), adapter=["one", None, "one"], progress=False)
            found.append(tokens_of(outputs))
    assert found[0] == found[1]
    assert found[0][0] != greedy_tokens("qwen3", PROMPTS[0], 8)
    assert found[0][1] == greedy_tokens("qwen3", PROMPTS[1], 8)


def test_weights_that_are_quantised_at_the_start_stay_close_to_floats() -> None:
    with engine("arcee", quantization="int8") as llm:
        formats = {one["format"] for one in llm.describe()["weight_formats"]}
        outputs = run(llm, PROMPTS, greedy(1, logprobs=1))
    assert len(formats) > 1, "products are computed in 8 bits"
    for prompt, output in zip(PROMPTS, outputs):
        token = output.outputs[0].token_ids[0]
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        assert abs(logprobs[0][token].logprob - float(oracle_logprobs("arcee", prompt)[-1, token])) < 0.5
