"""What is found out of a decoder of the Transformers library before its weights are read, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratoon.api.cli import main
from ratoon.core.config import PositionKind, longest_model_len
from ratoon.core.errors import ConfigError, ModelError
from ratoon.core.settings import engine_config
from ratoon.models import transformers_config
from ratoon.models.families import LIBRARY_FAMILIES
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.speeds import speeds_of
from tests.golden.library_models import MODELS, SHARED, TWO_KINDS

SMALL = {**SHARED, "architectures": ["ArceeForCausalLM"], "model_type": "arcee", "dtype": "bfloat16"}


def config_of(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return {**SMALL, "architectures": [architecture], "model_type": model_type, **changes}


def test_windows_heads_and_sizes_are_those_that_the_module_computes_with() -> None:
    config = parse_hf_config(config_of("Exaone4ForCausalLM", "exaone4", **TWO_KINDS), "somewhere")
    assert config.library is not None and "auto_map" not in config.library
    assert (config.sliding_window, config.sliding_layers) == (20, (True, False, True))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 16)
    assert (config.vocab_size, config.hidden_size, config.max_position) == (97, 64, 128)
    assert (config.checkpoint_dtype, config.eos_token_ids, config.position_kind) == (
        "bfloat16", (2,), PositionKind.ROTARY
    )  # fmt: skip
    learned = config_of("OPTForCausalLM", "opt", ffn_dim=112, word_embed_proj_dim=64, pad_token_id=0)
    assert parse_hf_config(learned, "somewhere").position_kind is PositionKind.TABLE


def test_a_rope_scaling_says_how_long_texts_may_be() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    config = parse_hf_config({**SMALL, "rope_parameters": yarn}, "somewhere")
    assert longest_model_len(config) == 512
    assert longest_model_len(parse_hf_config(SMALL, "somewhere")) == 128


def test_a_field_that_files_leave_out_is_the_library_s_own() -> None:
    raw = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    assert parse_hf_config(raw, "somewhere").num_kv_heads == 4


@pytest.mark.parametrize(
    ("architecture", "model_type", "changes", "problem"),
    [
        ("BloomForCausalLM", "bloom", {}, "does not go through the library's registry"),
        ("MptForCausalLM", "mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, "does not go through the library's"),
        ("GPTJForCausalLM", "gptj", {"rotary_dim": 8}, "does not go through the library's registry"),
        ("MambaForCausalLM", "mamba", {}, "keeps a state"),
        ("Llama4ForCausalLM", "llama4_text", {"num_local_experts": 2}, "neither causal nor a window"),
        ("DiffLlamaForCausalLM", "diffllama", {}, "do not attend exactly once"),
        ("CTRLLMHeadModel", "ctrl", {"dff": 112}, "reads no position_ids"),
        ("ArceeForCausalLM", "arcee", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
         "rope scaling 'dynamic'"),
        ("OPTForCausalLM", "opt", {"ffn_dim": 112, "word_embed_proj_dim": 32, "pad_token_id": 0},
         "embeddings of OPTForCausalLM are 32 wide, its layers 64"),
        ("ArceeForCausalLM", "arcee", {"hidden_size": "wide"}, "can't read its config"),
        ("ArceeForCausalLM", "nothing", {}, 'model_type "nothing" is not one of transformers'),
        ("ArceeForCausalLM", "arcee", {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
    ],
)  # fmt: skip
def test_what_a_paged_cache_cannot_serve_is_refused_by_name(
    architecture: str, model_type: str, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError) as caught:
        parse_hf_config(config_of(architecture, model_type, **changes), "somewhere")
    assert problem in caught.value.problem and caught.value.expected


def test_the_setting_chooses_between_native_and_library() -> None:
    llama = config_of("LlamaForCausalLM", "llama")
    assert parse_hf_config(llama, "somewhere").library is None
    assert parse_hf_config(llama, "somewhere", "transformers").library is not None
    with pytest.raises(ModelError, match="'ArceeForCausalLM' is not supported"):
        parse_hf_config(SMALL, "somewhere", "native")
    with pytest.raises(ModelError, match="not one of the decoders"):
        parse_hf_config({**SMALL, "architectures": ["BertModel"]}, "somewhere", "transformers")
    assert engine_config("m", model_impl="vllm").model_backend == "native"
    assert engine_config("m", model_impl="transformers").model_backend == "transformers"
    with pytest.raises(ConfigError, match="model_backend"):
        engine_config("m", model_backend="other")


def test_without_the_library_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_config, "_table_of_decoders", lambda: "")
    monkeypatch.setattr(transformers_config, "is_installed", lambda: False)
    with pytest.raises(ModelError) as caught:
        parse_hf_config(SMALL, "somewhere")
    assert 'pip install "ratoon[transformers]"' in caught.value.expected
    with pytest.raises(ModelError, match="is not installed") as caught:
        parse_hf_config(SMALL, "somewhere", "transformers")
    assert caught.value.expected == 'pip install "ratoon[transformers]"'


@pytest.mark.slow  # the child imports torch
@pytest.mark.full
def test_a_process_without_torch_asks_a_child_and_gets_the_same_config() -> None:
    """The process of the HTTP server has no torch."""
    program = (
        "import json, sys\n"
        "from ratoon.models.hf_config import parse_hf_config\n"
        f"print(repr(parse_hf_config(json.loads({json.dumps(SMALL)!r}), 'somewhere')))\n"
        "assert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [repr(parse_hf_config(SMALL, "somewhere"))]


def test_what_a_child_refuses_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    bloom = config_of("BloomForCausalLM", "bloom")
    answer = transformers_config._answer({"raw": bloom, "architecture": "BloomForCausalLM", "source": "somewhere"})
    ended = subprocess.CompletedProcess([], 0, stdout=f"a warning\n{json.dumps(answer)}\n", stderr="")
    monkeypatch.setattr(transformers_config.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(ModelError, match="registry of attention functions"):
        transformers_config._ask_child("{}", "somewhere")
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nMemoryError")
    monkeypatch.setattr(transformers_config.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelError, match=r"the Transformers library failed.*MemoryError"):
        transformers_config._ask_child("{}", "somewhere")


def test_listed_families_are_among_those_that_golden_tests_compare() -> None:
    assert set(LIBRARY_FAMILIES) <= {architecture for architecture, *_ in MODELS.values()}


def test_check_says_how_a_config_would_run_or_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    assert main(["models", "--check", str(path), "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["architecture"], found["backend"], found["dtype"]) == ("ArceeForCausalLM", "transformers", "float32")
    assert found["attention"] == {"layers 0-2 (full)": "cpu"} and found["speeds"] == []
    # Embeddings and head; of a layer: q, k, v, o, up, down and two norms; the final norm
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64 * 112 + 2 * 64
    assert found["num_weights"] == 2 * 97 * 64 + 3 * layer + 64
    assert found["weight_bytes"] == 4 * found["num_weights"]
    assert found["kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 4
    assert main(["models", "--check", str(tmp_path), "--device", "cpu", "--model-backend", "native"]) != 0
    assert "not supported" in capsys.readouterr().err
    path.write_text(json.dumps(config_of("LlamaForCausalLM", "llama")))
    assert main(["models", "--check", str(tmp_path), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM runs natively" in shown
    assert all(speed.text() in shown for speed in speeds_of("LlamaForCausalLM"))
