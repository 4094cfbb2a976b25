"""Models with latent attention against transformers, in float32. There keys and values are multiplied out; here heads
attend to what they are products of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ratoon.api.llm import LLM
from ratoon.core.params import BeamSearchParams, HiddenStatesParams
from ratoon.execution.device_kinds import CpuDevice
from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.ops import Ops
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.build import build_model
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.source import resolve_model
from tests.golden.dense_step import dense_logits
from tests.golden.engines import engine, greedy, oracle_tokens, run, tiny_model, tokens_of
from tests.golden.hidden_oracle import oracle_states
from tests.golden.tiny_latent_models import KV_RANK, LATENT_MODELS, ROPE
from tests.golden.tiny_models import random_token_ids
from tests.rank_executor import NAME

CPU = torch.device("cpu")
TOLERANCE = 5e-5  # of logits that reach about 3, by products in another order
OPS: dict[str, Ops] = {"torch": TorchOps()}
if not native_ops_reasons(CPU, torch.float32):
    OPS["native"] = NativeOps()
PROMPTS = [random_token_ids(length, seed=length) for length in (33, 1, 18)]
BACKENDS = ["torch", *(["cpu"] if "native" in OPS else [])]


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("family", LATENT_MODELS)
def test_logits_equal_those_of_transformers(family: str, kind: str) -> None:
    tiny = tiny_model(family)
    model = build_model(tiny.config, tiny.source, OPS[kind], CPU, torch.float32)
    for length in (1, 2, 40):
        token_ids = random_token_ids(length, seed=length)
        logits = dense_logits(model, token_ids)
        torch.testing.assert_close(logits, tiny.oracle_logits(token_ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", LATENT_MODELS)
def test_a_folder_as_transformers_writes_it_has_the_same_model(family: str, tmp_path: Path) -> None:
    tiny = tiny_model(family)
    tiny.oracle.save_pretrained(tmp_path)
    found = resolve_model(str(tmp_path))
    assert (found.config.experts, found.config.latent) == (tiny.config.experts, tiny.config.latent)
    model = build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
    token_ids = random_token_ids(30)
    torch.testing.assert_close(dense_logits(model, token_ids), tiny.oracle_logits(token_ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", LATENT_MODELS)
def test_the_config_of_transformers_is_parsed_as_the_one_written_by_hand(family: str) -> None:
    tiny = tiny_model(family)
    assert parse_hf_config(tiny.oracle.config.to_dict(), "config") == tiny.config


def check_hidden_states(llm: LLM, family: str) -> None:
    """Compares the hidden states of all layers, at all positions."""
    params = HiddenStatesParams(layers="all", positions="all")
    (found,) = llm.extract_hidden_states([PROMPTS[0]], params, progress=False)
    wanted = np.delete(oracle_states(family, PROMPTS[0]), -2, axis=0)  # as transformers lists them
    np.testing.assert_allclose(found.tensor.numpy(), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", LATENT_MODELS)
@pytest.mark.one_in(3)
def test_long_answers_of_an_engine_are_those_of_transformers(family: str, backend: str) -> None:
    """Prompts are computed in chunks of 12 tokens."""
    with engine(family, attention_backend=backend, max_num_batched_tokens=12) as llm:
        outputs = run(llm, PROMPTS, greedy(32, logprobs=2, prompt_logprobs=0))
        assert tokens_of(outputs) == [oracle_tokens(family, prompt, 32) for prompt in PROMPTS]
        check_hidden_states(llm, family)
        for prompt, output in zip(PROMPTS, outputs):
            sequence = prompt + list(output.outputs[0].token_ids)
            wanted = tiny_model(family).oracle_logits(sequence).log_softmax(-1)
            assert output.outputs[0].logprobs is not None
            for place, row in enumerate(output.outputs[0].logprobs, len(prompt)):
                assert abs(row[sequence[place]].logprob - float(wanted[place - 1, sequence[place]])) < 1e-4


def test_one_vector_of_a_token_is_kept() -> None:
    family = "deepseek_v2"
    with engine(family) as llm:
        facts = llm.describe()
    config = tiny_model(family).config
    assert facts["kv_bytes_per_token"] == config.num_layers * (KV_RANK + ROPE) * 4
    assert facts["kv_groups"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefixes_continuations_and_beams(backend: str) -> None:
    family = "deepseek_v3"
    with engine(family, attention_backend=backend) as llm:
        (first,) = run(llm, [PROMPTS[0]], greedy(9))
        (again,) = run(llm, [PROMPTS[0]], greedy(9))
        assert again.num_cached_tokens == 32 and tokens_of([again]) == tokens_of([first])
        suffix = random_token_ids(3, seed=50)
        further = llm.generate_continuation(first, suffix, greedy(8))
        sequence = [*PROMPTS[0], *first.outputs[0].token_ids, *suffix]
        assert list(further.outputs[0].token_ids) == oracle_tokens(family, sequence, 8)
        params = BeamSearchParams(beam_width=3, n=3, max_tokens=8, ignore_eos=True)
        searched = llm.beam_search([PROMPTS[0]], params)[0]
    prompt = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        wanted = tiny_model(family).oracle.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, num_beams=3, num_return_sequences=3,
            max_new_tokens=8, pad_token_id=0,
        )  # fmt: skip
    found = [list(choice.token_ids) for choice in searched.outputs]
    assert found == wanted[:, len(PROMPTS[0]) :].tolist()


@pytest.mark.skipif("native" not in OPS, reason="no kernels for this processor")
@pytest.mark.parametrize(("bits", "allowed"), [("int8", 0.1), ("int4", 1.0)])
def test_weights_in_few_bits(bits: str, allowed: float) -> None:
    """Products of heads stay in floats; vectors are kept in float16. `allowed`: of log-probabilities, with weights that
    are off by up to 1/254 and 1/14 of the largest beside them."""
    family = "deepseek_v3"
    with engine(family, quantization=bits, kv_cache_dtype="float16") as llm:
        (output,) = run(llm, [PROMPTS[0]], greedy(1, prompt_logprobs=0))
        assert any(kept["format"] != "float32" for kept in llm.describe()["weight_formats"])
    wanted = tiny_model(family).oracle_logits(PROMPTS[0]).log_softmax(-1)
    assert output.prompt_logprobs is not None
    found = [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], PROMPTS[0][1:]) if row]
    expected = [float(wanted[place, token]) for place, token in enumerate(PROMPTS[0][1:])]
    assert 0 < np.abs(np.array(found) - np.array(expected)).mean() < allowed


@pytest.mark.skipif("native" not in OPS, reason="no kernels for this processor")
def test_steps_of_an_engine_are_recorded_passes() -> None:
    """Products of heads and latent attention are kernels, too."""
    with engine("deepseek_v3") as llm:
        run(llm, PROMPTS, greedy(16))
        runner = llm._client.core.executor._worker.runner
        assert runner.recorded is not None and len(runner.recorded) > 0
        assert {choice["backend"] for choice in llm.describe()["attention"]} == {"cpu"}


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_two_ranks_answer_as_one_worker(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has half of the heads, and the vectors of all tokens."""
    monkeypatch.setattr(CpuDevice, "make_ops", lambda *arguments: TorchOps())  # ranks are threads here
    with engine(family, executor=NAME, attention_backend="torch") as llm:
        outputs = run(llm, PROMPTS, greedy(12))
        assert tokens_of(outputs) == [oracle_tokens(family, prompt, 12) for prompt in PROMPTS]
        check_hidden_states(llm, family)
        config = tiny_model(family).config
        assert llm.describe()["kv_bytes_per_token"] == config.num_layers * (KV_RANK + ROPE) * 4
