"""What happens on CUDA when a step runs out of memory, and when the device is lost."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ratoon import LLM, SamplingParams
from ratoon.core.errors import DeviceLostError
from ratoon.core.request import EngineCoreRequest
from ratoon.execution.model_runner import ModelRunner
from tests.cuda import losing_executor
from tests.cuda.test_graphs import core_of
from tests.e2e.servers import serving
from tests.faults.processes import PYTHONPATH
from tests.golden import tiny_models
from tests.golden.test_cuda import run_to_the_end
from tests.golden.tiny_models import random_token_ids
from tests.unit.api.server.harness import MODEL, write_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_too_little_memory_in_a_step_fails_it_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(tiny_models.tiny_llama(), "cuda", 2, True)
    execute = ModelRunner.execute_model

    def demand_too_much(runner: ModelRunner, plan: Any) -> None:
        if "huge" in plan.num_scheduled_tokens:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        execute(runner, plan)

    monkeypatch.setattr(ModelRunner, "execute_model", demand_too_much)
    for name in ("a", "huge", "b"):
        params = SamplingParams(temperature=0.0, max_tokens=6)
        core.add_request(EngineCoreRequest(name, random_token_ids(9, seed=len(name)), params))
    ends = {}
    while core.has_work():
        for output in core.step().outputs:
            if output.finish_reason is not None:
                ends[output.request_id] = output.error
    assert ends["a"] is None and ends["b"] is None and "memory" in (ends["huge"] or "")


def test_a_device_that_is_full_fails_a_step_and_serves_again_once_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process gets no more memory while a step runs; others that use the device keep theirs. What torch had kept
    for reuse is enough for small steps, so the step asks for more than that."""
    core = core_of(tiny_models.tiny_llama(), "cuda", 2, True)
    execute, limits = ModelRunner.execute_model, []

    def take_all(runner: ModelRunner, plan: Any) -> None:
        if "late" in plan.num_scheduled_tokens and not limits:
            limits.append((torch.cuda.memory_reserved() + 2**28) / torch.cuda.mem_get_info()[1])
            torch.cuda.set_per_process_memory_fraction(limits[0])
            torch.empty(2**30, dtype=torch.uint8, device="cuda")
        execute(runner, plan)

    monkeypatch.setattr(ModelRunner, "execute_model", take_all)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    for name in ("a", "late", "b"):
        core.add_request(EngineCoreRequest(name, random_token_ids(9, seed=len(name)), params))
    try:
        found = run_to_the_end(core)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(limits) == 1
    assert found["a", 0] == found["b", 0] and {len(tokens) for tokens in found.values()} == {12}


@pytest.fixture
def model_folder(tmp_path: Any) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "torch_dtype": "float32", "eos_token_id": 96,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


SETTINGS: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "load_format": "dummy", "skip_tokenizer": True, "num_blocks": 64,
}  # fmt: skip


@pytest.mark.parametrize("kind", losing_executor.KINDS)
def test_a_lost_device_restarts_the_engine_process_and_requests_are_answered(
    kind: str, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts: Any = [random_token_ids(length, seed=length) for length in (3, 9, 20)]
    with LLM(model_folder, **SETTINGS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, progress=False)]
    mark = f"{model_folder}/lost"
    monkeypatch.setenv(losing_executor.MARK_VARIABLE, mark)
    monkeypatch.setenv(losing_executor.KIND_VARIABLE, kind)
    with LLM(model_folder, process=True, executor=losing_executor.NAME, **SETTINGS) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params, progress=False)]
    with open(mark) as lost:
        assert lost.read() == "lost"
    assert found == expected


@pytest.mark.long
def test_a_server_answers_a_request_whose_device_was_lost_on_the_way(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / MODEL)
    mark = tmp_path / "lost"
    environment = {
        losing_executor.MARK_VARIABLE: str(mark),
        losing_executor.KIND_VARIABLE: "an illegal address",
        "PYTHONPATH": PYTHONPATH,
    }
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with serving(folder, "--device", "cuda", "--executor", losing_executor.NAME, **environment) as server:
        answers, engines = [], []
        for _ in range(2):
            engines.append(asked(server.url, "health")["engines"][0]["pid"])
            answers.append(asked(server.url, "v1/completions", body))
        engines.append(asked(server.url, "health")["engines"][0]["pid"])
    assert mark.read_text() == "lost" and engines[0] != engines[1] == engines[2]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [24, 24]
    assert answers[0]["choices"] == answers[1]["choices"]


def asked(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        parsed: dict[str, Any] = json.load(answer)
        return parsed


def test_a_device_that_does_not_respond_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without losing this process's device."""
    core = core_of(tiny_models.tiny_llama(), "cuda", 2, True)

    def refuse(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(ModelRunner, "execute_model", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    core.add_request(EngineCoreRequest("a", [1, 2, 3], SamplingParams(max_tokens=2)))
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        core.step()
