"""DeepSeek's files in 8-bit floats with a scale for each block: log-probabilities and answers are those of the weights
that a folder stands for, computed by transformers, on one worker, on ranks and on stages."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ratoon.core.errors import ModelError
from ratoon.execution.device_kinds import CpuDevice
from ratoon.layers.native_ops import native_ops_reasons
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.build import build_model
from ratoon.models.source import resolve_model
from tests import rank_executor, stage_executor
from tests.golden.block_fp8_files import encode, large_deepseek_v3, write_folder
from tests.golden.dense_step import dense_logits
from tests.golden.engines import engine_of_folder, greedy, run, tokens_of
from tests.golden.tiny_models import TinyModel, random_token_ids

CPU = torch.device("cpu")
PROMPT = random_token_ids(33, seed=4)
COUNT = 16  # tokens of an answer
TOLERANCE = 5e-5  # of logits that reach 4, by products in another order
needs_kernels = pytest.mark.skipif(bool(native_ops_reasons(CPU, torch.float32)), reason="no kernels for this processor")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TinyModel]:
    folder, tiny = tmp_path_factory.mktemp("fp8"), large_deepseek_v3()
    write_folder(folder, tiny)
    return folder, tiny


def logprobs_of(output: Any) -> list[float]:
    assert output.error is None and output.prompt_logprobs is not None
    return [row[token].logprob for token, row in zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True) if row]


def expected_logprobs(tiny: TinyModel) -> list[float]:
    rows = tiny.oracle_logits(PROMPT).double().log_softmax(-1)
    return [float(rows[place, token]) for place, token in enumerate(PROMPT[1:])]


@torch.inference_mode()
def expected_tokens(tiny: TinyModel) -> list[int]:
    prompt = torch.tensor([PROMPT])
    found = tiny.oracle.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=COUNT, pad_token_id=0
    )
    return found[0, len(PROMPT) :].tolist()


SETTINGS: dict[str, dict[str, Any]] = {
    "one worker": {},
    "two ranks": {"executor": rank_executor.NAME},
    "two ranks that share out experts": {"executor": rank_executor.NAME, "enable_expert_parallel": True},
    "two stages": {"executor": stage_executor.NAME, "pipeline_parallel_size": stage_executor.NUM_STAGES},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_answers_are_those_of_the_decoded_weights(
    kind: str, written: tuple[Path, TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank cuts weights inside blocks: 80 of 160 inner features of an expert, and 96 inputs of `o_proj`."""
    folder, tiny = written
    if kind != "one worker":  # the kernels' threads are those of one worker in a process
        monkeypatch.setattr(CpuDevice, "make_ops", lambda *arguments: TorchOps())
    with engine_of_folder(folder, quantization="none", attention_backend="torch", **SETTINGS[kind]) as llm:
        (output,) = run(llm, [PROMPT], greedy(COUNT, prompt_logprobs=0))
    assert tokens_of([output]) == [expected_tokens(tiny)]
    assert logprobs_of(output) == pytest.approx(expected_logprobs(tiny), abs=1e-4)


@needs_kernels
@pytest.mark.parametrize(("quantization", "kept", "allowed"), [("auto", "Q8_0", 0.1), ("int4", "Q4_1", 1.0)])
def test_on_a_cpu_they_are_integers_of_as_many_bits(
    quantization: str, kept: str, allowed: float, written: tuple[Path, TinyModel]
) -> None:
    """`allowed`: of log-probabilities, on average, where weights and activations are off by up to 1/254 of the largest
    beside them, and weights of 4 bits by 1/30."""
    folder, tiny = written
    with engine_of_folder(folder, quantization=quantization) as llm:
        (output,) = run(llm, [PROMPT], greedy(1, prompt_logprobs=0))
        formats = {one["format"] for one in llm.describe()["weight_formats"]}
    differences = torch.tensor(logprobs_of(output)) - torch.tensor(expected_logprobs(tiny))
    assert kept in formats and not any("F8" in name for name in formats)
    assert 0 < float(differences.abs().mean()) < allowed


def further_layer(index: int) -> dict[str, torch.Tensor]:
    """Some of the tensors of a layer that predicts further tokens, as DeepSeek-V3's files have them."""
    prefix, product = f"model.layers.{index}.", encode(torch.randn(160, 320))
    return {
        f"{prefix}enorm.weight": torch.ones(160), f"{prefix}eh_proj.weight": product.numbers,
        f"{prefix}eh_proj.weight_scale_inv": product.scales, f"{prefix}embed_tokens.weight": torch.ones(8, 160),
        f"{prefix}shared_head.head.weight": torch.ones(8, 160), f"{prefix}self_attn.o_proj.weight": torch.ones(4, 4),
    }  # fmt: skip


def with_tensors(folder: Path, target: Path, more: dict[str, torch.Tensor]) -> Path:
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    save_file(load_file(folder / "model.safetensors") | more, target / "model.safetensors")
    return target


def test_layers_that_predict_further_tokens_are_left_out_with_a_line_in_the_log(
    written: tuple[Path, TinyModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, tiny = written
    found = resolve_model(str(with_tensors(folder, tmp_path, further_layer(3) | further_layer(4))))
    with caplog.at_level(logging.INFO, logger="ratoon"):
        model = build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
    for index in (3, 4):
        assert f"the 5 tensors of model.layers.{index} predict further tokens, and are left out" in caplog.text
    torch.testing.assert_close(dense_logits(model, PROMPT), tiny.oracle_logits(PROMPT), atol=TOLERANCE, rtol=0)


def test_another_layer_behind_the_last_is_left_over(written: tuple[Path, TinyModel], tmp_path: Path) -> None:
    more = {"model.layers.3.input_layernorm.weight": torch.ones(160)}
    found = resolve_model(str(with_tensors(written[0], tmp_path, more)))
    with pytest.raises(ModelError, match=r"has no place for: model.layers.3.input_layernorm.weight"):
        build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
