"""A script that was written for vLLM runs here with one changed import."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from ratoon.api.cli import parse_arguments
from ratoon.api.llm import LLM
from ratoon.api.options import engine_settings
from ratoon.cli import main
from ratoon.core.adapters import LoRARequest
from ratoon.core.errors import RequestError
from ratoon.core.params import SamplingParams

EXAMPLE = Path(__file__).parents[3] / "examples/from_vllm.py"


def test_the_example_runs_as_it_is(client, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "fake"])
    monkeypatch.setattr("ratoon.core.config.longest_model_len", lambda model: 512)
    client.script = lambda request, choice: [*b"ok", 256]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Prompt: 'The capital of France is', text: 'ok'"
    assert lines[2:] == ["Answer: 'ok', stop", "Answer: 'ok', stop"]
    assert bytes(client.added[2].prompt_token_ids) == b"[user]Name a river in Europe.\n[assistant]"


def test_the_example_has_one_import_of_ours():
    assert EXAMPLE.read_text().count("ratoon import") == 1


def test_calls_take_what_vllm_calls_take(client):
    llm = LLM(model="fake", skip_tokenizer_init=False)
    params = SamplingParams(max_tokens=2)
    message = [{"role": "user", "content": "hi"}]
    assert len(llm.generate(["ab"], params, use_tqdm=False, lora_request=None)) == 1
    rendered = []
    llm.chat_prompt = lambda messages, **variables: rendered.append(variables) or "hi"
    assert len(llm.chat(message, params, use_tqdm=lambda *a, **k: None, chat_template="{{ messages }}")) == 1
    assert rendered[0]["chat_template"] == "{{ messages }}"
    named = LoRARequest("sql", 1, "/adapters/sql")
    for call in (lambda: llm.generate("a", lora_request=named), lambda: llm.chat(message, lora_request=named)):
        with pytest.raises(RequestError, match=r"lora_request: the engine has no memory for adapters; .*enable_lora"):
            call()
    with pytest.raises(RequestError, match="tokenizer"):
        LLM(model="fake", skip_tokenizer_init=True).get_tokenizer()


@pytest.mark.parametrize(
    ("progress", "use_tqdm", "shown"), [(True, False, False), (False, True, True), (True, None, True)]
)
def test_use_tqdm_is_progress(client, monkeypatch, progress, use_tqdm, shown):
    asked = []
    import ratoon.api.llm as module

    original = module.request_progress
    monkeypatch.setattr(
        module, "request_progress", lambda count, wanted: asked.append(wanted) or original(count, False)
    )
    LLM("fake").generate("ab", SamplingParams(max_tokens=1), progress=progress, use_tqdm=use_tqdm)
    assert asked == [shown]


def test_the_command_line_of_vllm_serve_means_the_same(capsys):
    words = "serve fake --gpu-memory-utilization 0.9 -tp 1 --max-model-len 64 --served-model-name a b --enforce-eager"
    args = parse_arguments([*words.split(), "--swap-space", "1", "-dp", "2", "--no-enable-prefix-caching"])
    assert (args.served_model_name, args.num_replicas) == (["a", "b"], 2)
    assert engine_settings(args) == {
        "gpu_memory_utilization": 0.9, "tensor_parallel_size": 1, "max_model_len": 64, "swap_space": 1.0,
        "enforce_eager": True, "enable_prefix_caching": False,
    }  # fmt: skip
    args = parse_arguments(["serve", "fake", "-pp", "2"])
    assert engine_settings(args)["pipeline_parallel_size"] == 2
    assert main(["generate", "fake", "hi", "--cpu-offload-gb", "2"]) == 2
    assert "--cpu-offload-gb: 2.0 is not supported" in capsys.readouterr().err
