"""The programs that compare engines on a GPU still run: on the CPU, with a tiny shape: no figure means anything."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from ratoon import LLM, SamplingParams

REPOSITORY = Path(__file__).parents[2]
LIMIT = 600  # seconds; a run takes about ten, but the machine may be busy
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 600,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
FAKE_VLLM = """
from types import SimpleNamespace as Some


class LLM:
    def __init__(self, model, **settings):
        assert settings["load_format"] == "dummy" and settings["gpu_memory_utilization"] == 0.8, settings

    def generate(self, prompts, params, use_tqdm):
        return [Some(outputs=[Some(token_ids=[7] * one.max_tokens)]) for one in params]

    def beam_search(self, prompts, params):
        tokens = [prompt["prompt_token_ids"] + [7] * params.max_tokens for prompt in prompts]
        return [Some(sequences=[Some(tokens=one)] * params.beam_width) for one in tokens]


class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        self.max_tokens = max_tokens
"""
FAKE_SAMPLING_PARAMS = """
class BeamSearchParams:
    def __init__(self, beam_width, max_tokens, ignore_eos):
        self.beam_width, self.max_tokens = beam_width, max_tokens
"""
FAKE_VLLM_COMMAND = """
import sys

from ratoon.cli import main

command, model, *options = sys.argv[1:]
given = dict(zip(options[::2], options[1::2]))
assert command == "serve" and given["--load-format"] == "dummy" and given["--dtype"] == "bfloat16", sys.argv
sys.argv = ["ratoon", "serve", model, "--host", given["--host"], "--port", given["--port"], "--load-format", "dummy"]
sys.argv += ["--device", "cpu", "--dtype", "float32", "--num-blocks", "200", "--max-model-len", "64"]
sys.exit(main())
"""
TINY_WITH_IMAGES = {
    "vocab_size": 600, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "torch_dtype": "float32", "vision_start_token_id": 588,
    "vision_end_token_id": 589, "image_token_id": 590, "video_token_id": 591,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
}  # fmt: skip
TINY_VISION = {
    "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "out_hidden_size": 64, "window_size": 56,
    "fullatt_block_indexes": [1],
}  # fmt: skip
FAKE_VLLM_WITH_IMAGES = """
from types import SimpleNamespace as Some


class LLM:
    def __init__(self, model, **settings):
        assert settings["load_format"] == "dummy" and settings["limit_mm_per_prompt"]["image"] == 1, settings

    def generate(self, prompts, params, use_tqdm):
        assert all(prompt["multi_modal_data"]["image"].size == (100, 100) for prompt in prompts)
        assert all(prompt["prompt_token_ids"].count(590) == 1 for prompt in prompts)
        return [Some(outputs=[Some(token_ids=[7] * one.max_tokens)]) for one in params]


class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        self.max_tokens = max_tokens
"""
ON_THE_CPU = {"device": "cpu", "dtype": "float32", "num_blocks": 200, "max_num_seqs": 32, "num_threads": 1}


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def run_program(name: str, shape: Path, folder: Path, settings: dict[str, object], *options: str) -> str:
    command = [sys.executable, f"bench/gpu/{name}", "--models", str(shape)]
    command += ["--settings", json.dumps(ON_THE_CPU | settings), "--work-folder", str(folder / "work")]
    command += ["--json", str(folder / "out.json"), *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.full
def test_every_workload_is_measured_and_one_that_fails_does_not_end_the_run(shape: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    longest = {"max_model_len": 36}  # the prompt of the prefill workload has 40 tokens
    options = ("--vllm-path", str(write_fake_vllm(tmp_path / "site")), "--plot", str(tmp_path / "out.png"))
    shown = run_program("compare.py", shape, tmp_path, longest, "--quick", "--only", ALL_BUT_LONG_BEAMS, *options)
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(error["engine"], error["workload"]) for error in result["errors"]] == [("ratoon", "prefill")]
    assert "36" in result["errors"][0]["error"]
    theirs = {record["what"] for record in result["records"] if record["engine"] == "vllm"}
    figures = {record["what"]: record for record in result["records"] if record["engine"] == "ratoon"}
    assert theirs == figures.keys() - {"continuation_leased_ttft_ms"} | {"ttft_8192_ms"}
    assert figures.keys() == {
        "startup_s", "decode_bs1_ms_per_token", "decode_bs32_ms_per_step", "throughput_256req_out_tok_s",
        "continuation_ttft_ms", "continuation_leased_ttft_ms", "cold_705_ttft_ms", "beam32x3_700_ms",
        "beam32x3_700_32req_ms",
    }  # fmt: skip
    assert all(record["floor"] > 0 for what, record in figures.items() if what != "startup_s")
    assert shown.count("RESULT {") == len(figures) + len(theirs)
    (leased,) = [line for line in shown.splitlines() if line.startswith("  700 leased")]
    assert "×" in leased, "compared with the prefix cache of the peer"
    assert "failed: tiny bf16 ratoon prefill" in shown
    assert (tmp_path / "out.png").stat().st_size > 10_000


def write_fake_vllm(folder: Path) -> Path:
    """It answers at once. What is tested is how it is asked, and that both engines end in one table."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(FAKE_VLLM)
    (folder / "vllm" / "sampling_params.py").write_text(FAKE_SAMPLING_PARAMS)
    return folder


ALL_BUT_LONG_BEAMS = "startup,decode1,decode32,prefill,continue,continue-leased,beam,beam32,throughput"


@pytest.mark.slow
@pytest.mark.full
def test_servers_are_measured_at_several_rates(shape: Path, tmp_path: Path) -> None:
    command = write_fake_vllm(tmp_path / "site") / "vllm" / "entrypoints" / "cli" / "main.py"
    command.parent.mkdir(parents=True)
    command.write_text(FAKE_VLLM_COMMAND)
    options = ("--rates", "20,inf", "--requests", "4", "--warmup", "3", "--input-len", "8", "--output-len", "6")
    vllm = ("--vllm-path", str(tmp_path / "site"))
    shown = run_program("compare_http.py", shape, tmp_path, {"max_model_len": 64}, *options, *vllm)
    result = json.loads((tmp_path / "out.json").read_text())
    assert not result["errors"]
    assert [(load["engine"], load["rate"], load["requests"], load["failed"]) for load in result["loads"]] == [
        (engine, rate, 4, 0) for engine in ("ratoon", "vllm") for rate in (20, None)
    ]
    assert all(0 < load["ttft_p50"] <= load["ttft_p99"] for load in result["loads"])
    assert shown.count("# warmed up by 3 requests") == 2
    assert shown.count("×") >= 6  # at each rate three that are never zero: twice TTFT, and tokens a second


@pytest.mark.slow
@pytest.mark.full
def test_pictures_are_measured_with_both_engines(tmp_path: Path) -> None:
    published = REPOSITORY / "bench" / "gpu" / "models" / "qwen2.5-vl-3b"
    shape = Path(shutil.copytree(published, tmp_path / "shapes" / "tiny"))
    config = json.loads((shape / "config.json").read_text())
    config |= TINY_WITH_IMAGES | {"vision_config": config["vision_config"] | TINY_VISION}
    (shape / "config.json").write_text(json.dumps(config))
    site = write_fake_vllm(tmp_path / "site")
    (site / "vllm" / "__init__.py").write_text(FAKE_VLLM_WITH_IMAGES)
    options = ("--quick", "--max-model-len", "256", "--vllm-path", str(site))
    shown = run_program("images.py", shape, tmp_path, {}, *options)
    result = json.loads((tmp_path / "out.json").read_text())
    assert not result["errors"]
    assert [(record["engine"], record["what"]) for record in result["records"]] == [
        (engine, what)
        for engine in ("ratoon", "vllm")
        for what in ("picture_ttft_ms", "pictures_32req_ms", "shared_picture_32req_ms")
    ]
    assert shown.count("RESULT {") == 6 and shown.count("×") == 3


@pytest.mark.slow
@pytest.mark.full
def test_weights_that_engines_share_are_drawn_once_and_load(
    shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "bench" / "gpu")
    models = importlib.import_module("compare_parts.models")
    folder = models.write_random_model(shape, tmp_path, "cpu", 1)
    files = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text()) == TINY | {"num_hidden_layers": 1}
    assert models.write_random_model(shape, tmp_path, "cpu", 1) == folder
    assert files == {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    with LLM(str(folder), **ON_THE_CPU) as llm:
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True), progress=False)
        assert len(output.outputs[0].token_ids) == 2


def test_layers_are_cut_from_a_config_with_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "bench" / "gpu")
    models = importlib.import_module("compare_parts.models")
    config = {"num_hidden_layers": 3, "layer_types": ["a", "b", "a"], "hidden_size": 8}
    assert models.cut_config(config, 2) == config | {"num_hidden_layers": 2, "layer_types": ["a", "b"]}
    assert models.cut_config(config, 9) == config and models.cut_config(config, None) is config


def test_the_folder_of_pictures_has_a_processor_that_finds_its_placeholders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "bench" / "gpu")
    images = importlib.import_module("images")
    folder, config = images.prepare_model(REPOSITORY / "bench" / "gpu" / "models" / "qwen2.5-vl-3b", tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for word, field in images.SPECIAL.items():
        assert tokenizer.convert_tokens_to_ids(word) == config[field]
        assert tokenizer(f"{word}")["input_ids"] == [config[field]]


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    for program in ("compare.py", "compare_http.py", "images.py"):
        command = [sys.executable, f"bench/gpu/{program}", "--vllm-path", str(tmp_path)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 2 and "has no vllm/__init__.py" in done.stderr
