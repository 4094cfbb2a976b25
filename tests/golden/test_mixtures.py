"""Mixtures of experts against transformers, in float32: logits, and the same from files in all their forms."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.api.llm import LLM
from ratoon.core.errors import ModelError
from ratoon.core.params import BeamSearchParams, HiddenStatesParams
from ratoon.execution.device_kinds import CpuDevice
from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.ops import Ops
from ratoon.layers.shard import ModelPart, Shard
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.build import build_model
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.source import resolve_model
from tests.golden import tiny_mixtures
from tests.golden.dense_step import dense_logits
from tests.golden.engines import engine, greedy, oracle_tokens, run, scheduler_of, tiny_model, tokens_of
from tests.golden.hidden_oracle import oracle_states
from tests.golden.tiny_latent_models import LATENT_MODELS
from tests.golden.tiny_mixtures import MIXTURES
from tests.golden.tiny_models import random_token_ids
from tests.rank_executor import NAME
from tests.unit.layers.ranks import Meeting, Rank, on_all_ranks
from tests.waiting import wait_until

CPU = torch.device("cpu")
TOLERANCE = 2e-5  # of logits that reach about 3
OPS: dict[str, Ops] = {"torch": TorchOps()}
if not native_ops_reasons(CPU, torch.float32):
    OPS["native"] = NativeOps()


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("family", MIXTURES)
def test_logits_equal_those_of_transformers(family: str, kind: str) -> None:
    tiny = MIXTURES[family]()
    model = build_model(tiny.config, tiny.source, OPS[kind], CPU, torch.float32)
    for length in (1, 2, 40):
        token_ids = random_token_ids(length, seed=length)
        logits = dense_logits(model, token_ids)
        torch.testing.assert_close(logits, tiny.oracle_logits(token_ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_folder_as_transformers_writes_it_has_the_same_model(family: str, tmp_path: Path) -> None:
    """With the experts of a layer apart, as most files have them, and the config as it is parsed."""
    tiny = MIXTURES[family]()
    tiny.oracle.save_pretrained(tmp_path)
    found = resolve_model(str(tmp_path))
    assert found.config.experts == tiny.config.experts
    model = build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
    token_ids = random_token_ids(30)
    torch.testing.assert_close(dense_logits(model, token_ids), tiny.oracle_logits(token_ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_config_of_transformers_is_parsed_as_the_one_written_by_hand(family: str) -> None:
    tiny = MIXTURES[family]()
    parsed = parse_hf_config(tiny.oracle.config.to_dict(), "config")
    token_ids = random_token_ids(20)
    assert torch.equal(
        dense_logits(tiny._replace(config=parsed).build(), token_ids), dense_logits(tiny.build(), token_ids)
    )


PROMPTS = [random_token_ids(length, seed=length) for length in (33, 1, 18)]
BACKENDS = ["torch", *(["cpu"] if "native" in OPS else [])]
ENGINES = [name for name in MIXTURES if name not in ("qwen3_moe", "mixtral with a window")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ENGINES)
def test_long_answers_of_an_engine_are_those_of_transformers(family: str) -> None:
    with engine(family) as llm:
        outputs = run(llm, PROMPTS, greedy(32, logprobs=2, prompt_logprobs=0))
        assert tokens_of(outputs) == [oracle_tokens(family, prompt, 32) for prompt in PROMPTS]
        check_hidden_states(llm, family)
        for prompt, output in zip(PROMPTS, outputs):
            sequence = prompt + list(output.outputs[0].token_ids)
            wanted = tiny_model(family).oracle_logits(sequence).log_softmax(-1)
            assert output.outputs[0].logprobs is not None
            for place, row in enumerate(output.outputs[0].logprobs, len(prompt)):
                assert abs(row[sequence[place]].logprob - float(wanted[place - 1, sequence[place]])) < 1e-4


def check_hidden_states(llm: LLM, family: str) -> None:
    """Compares the hidden states of all layers, at all positions."""
    params = HiddenStatesParams(layers="all", positions="all")
    (found,) = llm.extract_hidden_states([PROMPTS[0]], params, progress=False)
    wanted = np.delete(oracle_states(family, PROMPTS[0]), -2, axis=0)  # as transformers lists them
    np.testing.assert_allclose(found.tensor.numpy(), wanted, atol=1e-4, rtol=0)


def test_a_continuation_of_a_batch_is_that_of_transformers() -> None:
    family = "qwen3_moe with dense layers"
    with engine(family) as llm:
        first = run(llm, PROMPTS, greedy(9))
        suffixes = [random_token_ids(3, seed=50 + place) for place in range(len(first))]
        for output, suffix in zip(first, suffixes):
            again = llm.generate_continuation(output, suffix, greedy(8))
            sequence = [*output.prompt_token_ids, *output.outputs[0].token_ids, *suffix]
            assert list(again.outputs[0].token_ids) == oracle_tokens(family, sequence, 8)


@pytest.mark.skipif("native" not in OPS, reason="no kernels for this processor")
def test_steps_of_an_engine_are_recorded_passes() -> None:
    """Routes are found anew in each of them, by kernels alone."""
    with engine("qwen2_moe") as llm:
        run(llm, PROMPTS, greedy(16))
        runner = llm._client.core.executor._worker.runner
        assert runner.recorded is not None and len(runner.recorded) > 0


DRAFTS: dict[str, Any] = {
    "speculate": "ngram", "speculate_ngram_min": 1, "speculate_min_acceptance": 0.0, "speculate_max_seqs": 32
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_with_drafts_beams_and_prefixes_that_requests_share(backend: str) -> None:
    """Steps in which a branch has several rows, and branches that read the same blocks."""
    family, prompt = "gpt_oss", random_token_ids(18, seed=7) * 2
    with engine(family, attention_backend=backend, **DRAFTS) as llm:
        prompts = [prompt, [*prompt, 5, 9], [*prompt[:32], 8], PROMPTS[0]]
        outputs = run(llm, prompts, greedy(24))
        assert tokens_of(outputs) == [oracle_tokens(family, one, 24) for one in prompts]
        assert scheduler_of(llm).stats().drafts["ngram"].accepted_tokens > 0
        params = BeamSearchParams(beam_width=3, n=3, max_tokens=8, ignore_eos=True)
        searched = llm.beam_search([prompt], params)[0]
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        wanted = tiny_model(family).oracle.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=3, num_return_sequences=3,
            max_new_tokens=8, pad_token_id=0,
        )  # fmt: skip
    assert [list(choice.token_ids) for choice in searched.outputs] == wanted[:, len(prompt) :].tolist()


# Experts that are cut by inner features, and experts that ranks share out; with a shared expert, biases and sinks
@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe", "gpt_oss"])
@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.one_in(5)
def test_two_ranks_answer_as_one_worker(family: str, expert_parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "make_ops", lambda *arguments: TorchOps())  # ranks are threads here
    settings = {"executor": NAME, "attention_backend": "torch", "enable_expert_parallel": expert_parallel}
    with engine(family, **settings) as llm:
        outputs = run(llm, PROMPTS, greedy(12))
        assert tokens_of(outputs) == [oracle_tokens(family, prompt, 12) for prompt in PROMPTS]
        check_hidden_states(llm, family)


LONG_PROMPTS = [random_token_ids(length, seed=length) for length in (81, 70, 18)]  # steps of more than 64 rows


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3"])
def test_ranks_that_exchange_rows_have_the_logits_of_transformers(
    family: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight experts of two or four ranks, whose results go by all-to-all: with biases, and with shared experts."""
    monkeypatch.setattr(tiny_mixtures, "EXPERTS", 8)
    tiny, ids = {**MIXTURES, **LATENT_MODELS}[family](), LONG_PROMPTS[0]

    def logits_of(shard: Shard) -> torch.Tensor:
        part = ModelPart(replace(shard, expert_parallel=True, expert_dispatch="all_to_all"))
        return dense_logits(build_model(tiny.config, tiny.source, TorchOps(), CPU, torch.float32, part=part), ids)

    found = on_all_ranks(world_size, logits_of)
    assert all(torch.equal(logits, found[0]) for logits in found), "the same bits on all ranks"
    torch.testing.assert_close(found[0], tiny.oracle_logits(ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_ranks_that_exchange_rows_answer_as_one_worker(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "make_ops", lambda *arguments: TorchOps())  # ranks are threads here
    exchange = {"enable_expert_parallel": True, "expert_parallel_dispatch": "all_to_all"}
    with engine(family, executor=NAME, attention_backend="torch", **exchange) as llm:
        outputs = run(llm, LONG_PROMPTS, greedy(6))
        assert tokens_of(outputs) == [oracle_tokens(family, prompt, 6) for prompt in LONG_PROMPTS]


@pytest.mark.skipif(sys.platform != "linux", reason="workers in processes need Linux")
@pytest.mark.slow
@pytest.mark.parametrize(("family", "world_size"), [("qwen3_moe with dense layers", 2), ("glm4_moe", 4)])
def test_ranks_in_processes_share_out_experts_and_count_their_rows(family: str, world_size: int) -> None:
    """With the kernels of the CPU: prompts by all-to-all, and answers in recorded passes."""
    settings = {"tensor_parallel_size": world_size, "enable_expert_parallel": True, "expert_metrics": True}
    with engine(family, expert_parallel_dispatch="all_to_all", **settings) as llm:
        wait_until("a count of the experts' rows", lambda: run(llm, LONG_PROMPTS, greedy(2)) and llm.stats().experts)
        outputs = run(llm, LONG_PROMPTS, greedy(20))
        assert tokens_of(outputs) == [oracle_tokens(family, prompt, 20) for prompt in LONG_PROMPTS]


def test_ranks_that_can_t_share_out_experts_are_refused() -> None:
    tiny = MIXTURES["qwen3_moe"]()
    part = ModelPart(Shard(0, 4, Rank(Meeting(4), 0), expert_parallel=True))
    with pytest.raises(ModelError, match="6 experts can't be cut into 4 equal parts"):
        build_model(tiny.config, tiny.source, TorchOps(), CPU, torch.float32, part=part)


def test_the_rows_of_each_expert_are_counted_where_it_is_asked_for() -> None:
    family = "qwen3_moe with dense layers"
    with engine(family, expert_metrics=True, enable_prefix_caching=False) as llm:
        worker = llm._client.core.executor._worker
        run(llm, PROMPTS, greedy(5))
        worker._expert_load._next = 0.0  # a second may not be over
        counts = worker.stats.experts
        assert worker.stats.experts == {}  # not again so soon
        worker._expert_load._next = 0.0
        run(llm, PROMPTS, greedy(5))  # the outputs of its first step have them
        told = llm.stats().experts
        assert llm.stats().experts == told  # who asks gets the last ones, again if need be
    assert all(sum(told[layer]) > sum(counts[layer]) for layer in counts)
    config = tiny_model(family).config
    assert config.experts is not None
    assert list(counts) == [layer for layer in range(config.num_layers) if config.experts.is_in_layer(layer)]
    assert all(sum(of_layer) > 0 for of_layer in counts.values())
    assert all(len(of_layer) == config.experts.num_experts for of_layer in counts.values())
    # In all but the last layer, which reads some rows alone: those of prompts, and all tokens but the last
    rows = sum(len(prompt) + 4 for prompt in PROMPTS)
    assert sum(counts[1]) >= rows * config.experts.top_k
