"""Two tensor-parallel ranks behind one executor answer as one worker does, requests of every kind.

The ranks are threads, and their operations torch's own: the CPU kernels serve one thread at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratoon import LLM
from ratoon.core.params import HiddenStatesParams, SamplingParams
from ratoon.execution.device_kinds import CpuDevice
from ratoon.layers.torch_ops import TorchOps
from tests.golden.draft_heads import random_head
from tests.golden.engines import engine_of_folder, model_folder, tiny_model
from tests.golden.every_kind import PROMPTS, answers
from tests.golden.test_encoder_decoder_api import INPUTS, folder_of
from tests.rank_executor import NAME, WORLD_SIZE, RankExecutor


@pytest.fixture(autouse=True)
def plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "make_ops", lambda *arguments: TorchOps())


def open_engine(folder: Any, **settings: Any) -> LLM:
    common = {
        "device": "cpu",
        "num_threads": 1,
        "skip_tokenizer": True,
        "max_num_seqs": 8,
        "attention_backend": "torch",
    }
    return LLM(str(folder), **(common | {"num_blocks": 96} | settings))


# Weights that are cut by other rules: fused, head by head, interleaved, normed over all heads, with one KV head
DECODERS_ON_RANKS = ["phi3", "gpt_neox", "falcon with one key head", "glm4", "olmo2", "gemma2"]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "family", ["llama with grouped heads", "llama with one key head", "gpt2", "qwen2", *DECODERS_ON_RANKS]
)
def test_two_ranks_answer_as_one_worker(family: str) -> None:
    """Among them one with a single key-value head, which both ranks have."""
    states = HiddenStatesParams(positions="all", layers=[0, -1])
    with open_engine(model_folder(family)) as llm:
        expected, expected_states = answers(llm, PROMPTS), llm.extract_hidden_states(PROMPTS[0], states).tensor
    with open_engine(model_folder(family), executor=NAME) as llm:
        assert answers(llm, PROMPTS) == expected
        found_states = llm.extract_hidden_states(PROMPTS[0], states).tensor
        llm.sleep(2)
        llm.wake_up()
        assert answers(llm, PROMPTS) == expected
        executor = llm._client.core.executor
        assert isinstance(executor, RankExecutor)
    assert found_states == pytest.approx(expected_states, abs=1e-5)


def test_two_ranks_of_a_model_with_an_encoder_answer_as_one_worker() -> None:
    with open_engine(folder_of("bart")) as llm:
        expected = answers(llm, INPUTS[:3])
    with open_engine(folder_of("bart"), executor=NAME) as llm:
        assert answers(llm, INPUTS[:3]) == expected


def test_ranks_allocate_a_pool_of_half_of_the_heads() -> None:
    folder = model_folder("llama with as many key heads as heads")
    with engine_of_folder(folder, attention_backend="torch") as llm:
        whole = llm._client.core.executor.facts
    with open_engine(folder, executor=NAME) as llm:
        for facts in llm._client.core.executor.rank_facts:  # type: ignore[attr-defined]
            assert facts.kv_config.bytes_per_block * WORLD_SIZE == whole.kv_config.bytes_per_block
            assert facts.weight_bytes < 0.75 * whole.weight_bytes


@pytest.mark.parametrize("kind", ["itself", "eagle3", "mtp"])
def test_ranks_draft_together(kind: str, tmp_path: Path) -> None:
    """A model or head that drafts is cut as the model is."""
    family = "llama with grouped heads"
    source = f"draft:{model_folder(family)}"
    if kind != "itself":
        draft_vocab = 40 if kind == "eagle3" else None
        source = f"head:{random_head(kind, tiny_model(family).config, draft_vocab=draft_vocab).save(tmp_path)}"
    always = {"speculate": source, "speculate_tokens": 3, "speculate_max_seqs": 64, "speculate_min_acceptance": 0}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    drafted = []
    for settings in ({}, {"executor": NAME}):
        with open_engine(model_folder(family), **always, **settings) as llm:
            (output,) = llm.generate(PROMPTS[:1], params, progress=False)
            stats = llm.stats().drafts["draft" if kind == "itself" else "head"]
            drafted.append((list(output.outputs[0].token_ids), stats.draft_tokens, stats.accepted_tokens))
    assert drafted[0] == drafted[1]
    if kind == "itself":
        assert drafted[1][1] == drafted[1][2] > 10
