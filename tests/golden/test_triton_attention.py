"""Whole engines with the attention of GPUs, under Triton's interpreter: norms of heads and rotation with the store,
windows, biases, encoders and cross-attention. Where there is a GPU, test_cuda.py has the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ratoon.attention import triton_backend, triton_expanded, triton_latent
from ratoon.attention.triton_backend import TritonAttentionBackend
from ratoon.attention.triton_plan import Operands
from ratoon.execution.device_kinds import CpuDevice
from ratoon.layers.torch_ops import TorchOps
from tests.golden import encoder_engines
from tests.golden.encoder_engines import assert_greedy, core_of, decoder_prompt, source_of
from tests.golden.engines import engine, greedy, oracle_tokens, run, tokens_of
from tests.golden.tiny_models import random_token_ids
from tests.triton_interpreter import repair_interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here, not on CPU tensors")

PROMPTS = [random_token_ids(length, seed=length) for length in (33, 5)]
COUNT = 2
# One token that occurred before is enough for a draft, whatever its rows cost
DRAFTS: dict[str, Any] = {"speculate": "ngram", "speculate_ngram_min": 1, "speculate_min_acceptance": 0.0}

repair_interpreter()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonAttentionBackend, "reasons_against", classmethod(lambda cls, needs: []))
    monkeypatch.setattr(triton_backend, "choose_store_tile", lambda num_tokens: (16, 4))  # fewer programs, less time


@pytest.mark.parametrize(
    "family", ["qwen3 with heads wider than hidden size / heads", "qwen2 with windows by layer type", "gemma2"]
)
@pytest.mark.one_in(2)
def test_an_engine_gives_the_tokens_of_transformers(family: str) -> None:
    with engine(family, attention_backend="triton", max_num_batched_tokens=30) as llm:
        assert llm.describe()["attention_backend"] == "triton"
        found = tokens_of(run(llm, PROMPTS, greedy(COUNT)))
    assert found == [oracle_tokens(family, prompt, COUNT) for prompt in PROMPTS]


def test_so_does_one_whose_heads_have_sinks() -> None:
    """Prompts in chunks, decodes in one launch, and steps that check drafts: several rows of a branch."""
    family, kernels = "gpt_oss", set()
    decode = TritonAttentionBackend._decode

    def note(self: TritonAttentionBackend, operands: Operands, *rest: Any) -> None:
        kernels.add(operands.metadata.inputs.max_query_len > 1)
        decode(self, operands, *rest)

    repeating = PROMPTS[0] + oracle_tokens(family, PROMPTS[0], 24)  # it goes on as before, so that tokens are drafted
    with pytest.MonkeyPatch.context() as patch, engine(family, attention_backend="triton", **DRAFTS) as llm:
        patch.setattr(TritonAttentionBackend, "_decode", note)
        for prompt, count in ((PROMPTS[1], 2), (repeating, 4)):  # of two tokens none is drafted
            assert tokens_of(run(llm, [prompt], greedy(count))) == [oracle_tokens(family, prompt, count)]
    assert kernels == {False, True}


def test_so_does_one_with_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks: the first is expanded, the second and decodes are absorbed."""
    family, found = "deepseek_v2", []
    attend = triton_latent.attend_expanded

    def note(*args: Any) -> None:
        expansion = args[4]
        found.append((expansion.num_rows, expansion.num_keys, expansion.others is not None))
        attend(*args)

    monkeypatch.setattr(triton_latent, "attend_expanded", note)
    monkeypatch.setattr(triton_latent, "choose_store_tile", lambda num_tokens: (16, 4))
    monkeypatch.setattr(triton_expanded, "MIN_ROWS", 16)
    monkeypatch.setattr(triton_expanded, "GATHERED_KEYS", 64)
    monkeypatch.setattr(CpuDevice, "make_ops", lambda *arguments: TorchOps())  # weights as a GPU has them
    with engine(family, attention_backend="triton", max_num_batched_tokens=30) as llm:
        tokens = tokens_of(run(llm, PROMPTS, greedy(COUNT)))
    assert tokens == [oracle_tokens(family, prompt, COUNT) for prompt in PROMPTS]
    assert set(found) == {(30, 30, False)}


@pytest.mark.parametrize("family", ["t5"])
def test_so_does_one_with_an_encoder(family: str) -> None:
    asked = [(source_of(family, encoder), decoder_prompt(decoder)) for encoder, decoder in ((17, 2), (5, 1))]
    with core_of(family, attention_backend="triton") as driver:
        for number, (source, prompt) in enumerate(asked):
            driver.ask(str(number), source, prompt, encoder_engines.greedy(COUNT))
        driver.run()
        for number, (source, prompt) in enumerate(asked):
            tokens = driver.tokens(str(number))
            assert len(tokens) == COUNT
            assert_greedy(family, source, prompt, tokens)
