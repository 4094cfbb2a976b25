"""The benchmark programs still run: small sizes, which say nothing about speed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ratoon.layers.native import library
from ratoon.models.source import resolve_model
from tests.e2e.consoles import browser
from tests.golden.engines import model_folder, write_word_tokenizer
from tests.golden.tiny_encoder_models import BART_SIZES, NUM_MEL_BINS
from tests.real_models import needs_embedded_model
from tests.unit.api.server.harness import write_tiny_model

REPOSITORY = Path(__file__).parents[2]
LIMIT = 600  # seconds; a run takes about ten, but the machine may be busy


def run_program(name: str, *options: str) -> str:
    command = [sys.executable, f"bench/{name}", "--no-wait", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@needs_embedded_model
@pytest.mark.slow
@pytest.mark.full
def test_quality_compares_a_file_in_its_own_bits_with_the_decoded_one() -> None:
    command = [sys.executable, "bench/quality.py", "smollm2-135m", "--tokens", "128", "--window", "64"]
    command += ["--modes", "none", "auto"]
    done = subprocess.run(
        [*command, "--answers", "2", "--length", "2"], cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    _, _, decoded, kept = done.stdout.splitlines()
    assert decoded.startswith("| smollm2-135m | none | 513 |") and decoded.endswith("| +0.00% | 2 of 2 |")
    assert kept.startswith("| smollm2-135m | auto | 92 |") and kept.endswith("of 2 |")


@pytest.mark.parametrize("shape", ["tiny", "tiny-experts", "tiny-latent", "tiny-windows"])
def test_random_models_hold_the_same_numbers_in_every_form(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "bench")
    random_models = importlib.import_module("random_models")
    monkeypatch.setattr(random_models, "CACHE_FOLDER", tmp_path)
    model = random_models.make_random_model(shape)
    floats = resolve_model(str(model.folder)).tensors
    for path in model.files.values():
        quantised = resolve_model(str(path)).tensors
        assert quantised.shapes() == floats.shapes()
        for name in floats.shapes():
            assert torch.equal(quantised.read(name).floats().float(), floats.read(name).floats())


@pytest.mark.slow
@pytest.mark.full
def test_engines_are_compared_with_a_quantised_file_and_in_float32(tmp_path: Path) -> None:
    options = ("--tiny", "--random", "tiny", "--threads", "1", "--rounds", "1", "--engines", "ratoon,transformers")
    workloads = ("--workloads", "single,many-8,shared-prefix,beam")
    shown = run_program("cpu_peers.py", *options, *workloads, "--json", str(tmp_path / "out.json"))
    assert "## Q4_0 file, 1 threads" in shown and "## float32, 1 threads" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("float32, 1 threads, round 1/1, ratoon: many-8 ")]
    assert line.endswith(" tok/s")
    quantised, floats = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert quantised["figures"].keys() == {"single-decode", "single-end-to-end", "many-8", "shared-prefix", "beam"}
    assert quantised["weight_bytes"] < floats["weight_bytes"] / 4
    assert floats["identical_answers"] == {"transformers": {"identical": 6, "requests": 6}}
    assert floats["figures"]["many-8"]["best"] == floats["figures"]["many-8"]["ratios"]["transformers"]


def short_gguf_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A llama of 300 tokens whose context, 32 tokens, is shorter than the prompts of the smallest sizes."""
    monkeypatch.syspath_prepend(REPOSITORY / "bench")
    random_models = importlib.import_module("random_models")
    monkeypatch.setattr(random_models, "CACHE_FOLDER", folder)
    shape = random_models.SHAPES["tiny"] | {"max_position_embeddings": 32, "vocab_size": 300}
    monkeypatch.setitem(random_models.SHAPES, "tiny", shape)
    path: Path = random_models.make_random_model("tiny", ("Q4_0",)).files["Q4_0"]
    return path


def test_a_file_bounds_prompts_by_its_vocabulary_and_context_and_leaves_out_what_needs_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = short_gguf_file(tmp_path, monkeypatch)
    cpu_peers = importlib.import_module("cpu_peers")
    workloads = importlib.import_module("workloads")
    program = cpu_peers.CpuPeers(["--model", str(path)])
    assert program.args.parts == ["quantised"] and "ratoon" in program.args.engines_of["quantised"]
    assert "Hugging Face folder" in program.args.missing["the part float32"]
    assert "ctranslate2" in program.args.missing and program.models.max_model_len == 32
    assert program.models.find("gguf", program.args.formats[0]) == path
    # Two layers: 64 × 64 queries and outputs, 64 × 32 keys and values, three matrices of the feed-forward half
    assert program.models.num_product_weights == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    comparison = cpu_peers.Comparison(program.args, program.models, "quantised", program.args.formats[0], 1)
    for workload in workloads.WORKLOADS.values():
        for call in workload.plan(comparison.source, comparison.sizes):
            assert {len(prompt) + call.num_tokens <= 32 for prompt in call.prompts} == {True}
            assert max(token for prompt in call.prompts for token in prompt) < 300
    for options in (["--model", str(path), "--parts", "float32"], ["--model", str(tmp_path / "none.gguf")]):
        with pytest.raises(SystemExit):
            cpu_peers.CpuPeers(options)
        assert "--model: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.full
def test_a_file_is_measured_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = short_gguf_file(tmp_path, monkeypatch)
    options = ("--tiny", "--threads", "1", "--rounds", "1", "--engines", "ratoon", "--json", str(tmp_path / "out.json"))
    shown = run_program("cpu_peers.py", "--model", str(path), *options, "--workloads", "single,many-8,prefill")
    assert f"## {path.stem} file, 1 threads" in shown and "Left out, the part float32: " in shown
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert run["figures"].keys() == {"single-decode", "single-end-to-end", "many-8", "prefill"}


@pytest.mark.slow
@pytest.mark.full
def test_a_mixture_of_experts_is_compared(tmp_path: Path) -> None:
    options = ("--tiny", "--random", "tiny-experts", "--threads", "1", "--rounds", "1", "--workloads", "single,many-8")
    shown = run_program(
        "experts.py", *options, "--engines", "ratoon,transformers", "--json", str(tmp_path / "out.json")
    )
    assert "## Q4_0 file, 1 threads" in shown and "## float32, 1 threads" in shown
    _, floats = json.loads((tmp_path / "out.json").read_text())["runs"]
    found = floats["identical_answers"]["transformers"]
    assert found["identical"] == found["requests"] > 0


@pytest.mark.slow
@pytest.mark.full
def test_layers_with_windows_are_compared(tmp_path: Path) -> None:
    """The windows are shorter than the answers with their prompts."""
    options = ("--tiny", "--random", "tiny-windows", "--threads", "1", "--rounds", "1", "--workloads", "single,many-8")
    engines = ("--engines", "ratoon,transformers")
    run_program("cpu_peers.py", *options, *engines, "--json", str(tmp_path / "out.json"))
    quantised, floats = json.loads((tmp_path / "out.json").read_text())["runs"]
    found = floats["identical_answers"]["transformers"]
    assert found["identical"] == found["requests"] > 0
    assert quantised["weight_bytes"] < floats["weight_bytes"] / 3


@pytest.mark.slow
@pytest.mark.full
def test_latent_attention_is_compared(tmp_path: Path) -> None:
    options = ("--tiny", "--random", "tiny-latent", "--threads", "1", "--rounds", "1", "--workloads", "single,many-8")
    shown = run_program("latent.py", *options, "--engines", "ratoon,transformers", "--json", str(tmp_path / "out.json"))
    assert "## Q4_0 file, 1 threads" in shown and "## float32, 1 threads" in shown
    _, floats = json.loads((tmp_path / "out.json").read_text())["runs"]
    found = floats["identical_answers"]["transformers"]
    assert found["identical"] == found["requests"] > 0


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("program", ["states.py", "sinks.py"])
def test_hybrids_of_states_and_attention_and_attention_with_sinks_are_compared(program: str, tmp_path: Path) -> None:
    options = ("--tiny", "--threads", "1", "--rounds", "1", "--workloads", "single,many-8")
    shown = run_program(program, *options, "--json", str(tmp_path / "out.json"))
    assert "## float32, 1 threads" in shown
    (floats,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    found = floats["identical_answers"]["transformers"]
    assert found["identical"] == found["requests"] > 0


class BreakingEngine:
    """In the place of an engine's process: the third generation fails."""

    num_generations = 0

    def __init__(self) -> None:
        self.versions = {"fake": "1"}

    def start(self, prompt: list[int]) -> float:
        return 1.0

    def close(self) -> None:
        pass

    def call(self, name: str) -> Any:
        return SimpleNamespace(value=2**20)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Any:
        self.num_generations += 1
        if self.num_generations == 3:  # behind the warm-up and the first round
            raise RuntimeError("it breaks")
        return SimpleNamespace(seconds=2.0, token_ids=[[0] * num_tokens] * len(prompts), foreign_share=None)


def test_a_comparison_that_is_cut_off_keeps_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "bench")
    cpu_peers = importlib.import_module("cpu_peers")
    options = ["--tiny", "--random", "tiny", "--threads", "1", "--rounds", "2", "--workloads", "prefill,startup"]
    options += ["--engines", "ratoon", "--parts", "float32", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(cpu_peers.Comparison, "_make_engine", lambda self, name: engine)
    monkeypatch.setattr(cpu_peers, "measure_floors", lambda *arguments: None)
    engine = BreakingEngine()
    program = cpu_peers.CpuPeers(options)
    program.models = SimpleNamespace(name="fake", config={"vocab_size": 1000}, num_product_weights=10**6)
    with pytest.raises(RuntimeError, match="it breaks"):
        program.measure()
    (kept,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert kept["figures"]["startup"]["samples"] == {"ratoon": [1.0, 1.0]}
    assert kept["figures"]["prefill"]["samples"] == {"ratoon": [2.0]}
    shown = capsys.readouterr().out
    assert "float32, 1 threads, round 1/2, ratoon: prefill: TTFT 2.00 s\n" in shown


@needs_embedded_model
@pytest.mark.slow
@pytest.mark.full
def test_the_cost_of_a_streamed_token_is_measured_in_every_process(tmp_path: Path) -> None:
    sizes = ("--streams", "8", "--rounds", "1", "--input-len", "8", "--output-len", "50", "--step-ms", "1")
    shown = run_program("http_stream.py", *sizes, "--json", str(tmp_path / "out.json"))
    assert "bare server, for an event" in shown and "load generator" in shown
    (one,) = json.loads((tmp_path / "out.json").read_text())["rounds"]
    assert one["tokens_per_second"] > 0 and one["tokens_per_chunk"] >= 1


@needs_embedded_model
@pytest.mark.slow
@pytest.mark.full
def test_streams_over_two_front_ends_are_measured_against_one(tmp_path: Path) -> None:
    sizes = ("--streams", "8", "--rounds", "1", "--output-len", "20", "--step-ms", "1", "--generators", "2")
    shown = run_program("front_ends.py", *sizes, "--front-ends", "1,2", "--json", str(tmp_path / "out.json"))
    assert "ratio to the first" in shown
    rounds = json.loads((tmp_path / "out.json").read_text())["rounds"]
    assert rounds["2"][0]["service"] > 0 and rounds["1"][0]["service"] == 0


@pytest.mark.full
@needs_embedded_model
@pytest.mark.slow
def test_the_share_of_the_engine_is_measured_with_one_and_two_steps_in_flight() -> None:
    shown = run_program("engine_share.py", "--branches", "8", "--tokens", "16", "--rounds", "3", "--step-ms", "5")
    *_, row = shown.strip().splitlines()
    assert row.split()[0] == "8" and float(row.split()[-1]) > 0, shown


@needs_embedded_model
@pytest.mark.slow
@pytest.mark.full
def test_replicas_keep_conversations_together(tmp_path: Path) -> None:
    run_program("replicas.py", "--stub", "--sessions", "5", "--turns", "3", "--json", str(tmp_path / "out.json"))
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    one, balanced, turns = (results[name]["hit_rate"] for name in ("one engine", "2, balanced", "2, taking turns"))
    assert one >= balanced > turns


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux" or library() is None, reason="ranks need Linux, and their sums the kernels")
def test_ranks_are_measured_in_all_parts(tmp_path: Path) -> None:
    shown = run_program("ranks.py", "--quick", "--threads", "2", "--json", str(tmp_path / "out.json"))
    assert "the aim is below 100 µs" in shown and "tiny: 2 ranks × 1 threads" in shown
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert list(parts) == ["broadcast", "sums", "one-worker", "ranks", "stages"]
    assert parts["sums"]["sums"]["32 × 4096"].keys() == {"shared memory", "gloo"}
    assert parts["one-worker"]["tiny"]["one sequence, 4 tokens"]["ratio"]["median"] > 0


@needs_embedded_model
@pytest.mark.slow
@pytest.mark.full
def test_beams_are_measured_in_all_three_parts(tmp_path: Path) -> None:
    options = ("--quick", "--threads", "1", "--model", str(model_folder("llama with grouped heads")))
    files = ("--json", str(tmp_path / "out.json"))
    shown = run_program("beams.py", *options, *files)
    assert "Beams that are also Ratoon's, transformers: 100.0%" in shown
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert list(parts) == ["latency", "search", "steps"]
    assert set(parts["search"]["ratios"]["cold"]) == {"transformers"}
    assert parts["steps"]["growth"]["with_prefix"].keys() == {"2", "4"}


@needs_embedded_model
@pytest.mark.slow
@pytest.mark.full
def test_hidden_states_are_measured_in_all_three_parts(tmp_path: Path) -> None:
    options = ("--quick", "--threads", "1", "--model", str(model_folder("llama with grouped heads")))
    files = ("--json", str(tmp_path / "out.json"))
    shown = run_program("hidden_states.py", *options, *files)
    assert "the aim is at most 2" in shown
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert list(parts) == ["latency", "throughput", "prefill"]
    assert parts["latency"]["ratios"].keys() == {"in_steps", "saved", "transformers"}
    assert parts["throughput"]["ratios"].keys() == {"20", "100"}
    assert parts["prefill"]["ratios"].keys() == {"one_layer", "all_layers", "peer_one", "peer_all"}


@pytest.mark.slow
@pytest.mark.full
def test_images_are_measured_in_all_parts_and_tokens_are_those_of_the_peer(tmp_path: Path) -> None:
    files = ("--json", str(tmp_path / "out.json"))
    shown = run_program("images.py", "--quick", "--threads", "1", *files)
    assert "the aim is at least 1.3" in shown and "5 questions about a new picture" in shown
    assert "Pictures a second: " in shown
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert list(parts) == ["encoder", "preparation", "repeat", "shared", "text"]
    assert parts["encoder"]["seconds"].keys() == {"ratoon", "int8", "transformers"}
    assert parts["encoder"]["same"] == 1
    assert {part: list(found["ratios"]) for part, found in parts.items()} == {
        "encoder": ["floats", "bits"], "preparation": ["many", "same"], "repeat": ["saved", "text"],
        "shared": ["all"], "text": ["cost"],
    }  # fmt: skip


@needs_embedded_model
@pytest.mark.slow
@pytest.mark.full
def test_beams_behind_an_encoder_are_measured_and_are_those_of_the_peer(tmp_path: Path) -> None:
    files = ("--json", str(tmp_path / "out.json"))
    shown = run_program("encoder_beams.py", "--quick", "--threads", "1", "--parts", "t5", *files)
    assert "the aim is at most 2" in shown
    (result,) = json.loads((tmp_path / "out.json").read_text())["parts"].values()
    assert result["same"] == {"transformers, greedy": [1.0], "transformers, beams": [1.0]}
    assert result["growth"].keys() == {"ratoon", "transformers"}


@needs_embedded_model
@pytest.mark.slow
@pytest.mark.full
def test_speech_is_measured_from_samples_and_from_features(tmp_path: Path) -> None:
    options = ("--model", str(small_whisper(tmp_path / "model")), "--recording", str(noise(tmp_path / "noise.wav")))
    files = ("--json", str(tmp_path / "out.json"))
    run_program("speech.py", "--quick", "--threads", "1", "--parts", "transcription", *options, *files)
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert parts["transcription"]["same"] == {"transformers": [1.0] * 4}  # two clips, from samples and from features
    assert parts["transcription"]["ratios"].keys() == {"whole", "ready"}


@pytest.mark.slow
def test_bart_in_8_bits_is_compared_in_speed_and_in_errors(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    files = ("--json", str(tmp_path / "out.json"))
    engines = ("--engines", "ratoon,ctranslate2", "--ct2-python", sys.executable, "--quantization", "int8")
    run_program("encoder_beams.py", "--quick", "--threads", "1", "--parts", "bart,spellings", *engines, *files)
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert 0 < parts["spellings"]["ratoon"] < 0.1
    assert parts["bart"]["ratios"]["beams"].keys() == {"ctranslate2"}


def small_whisper(folder: Path) -> Path:
    """One that reads 30 seconds, and has the tokens of a language and a task."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**BART_SIZES, num_mel_bins=NUM_MEL_BINS, begin_suppress_tokens=None)
    model = transformers.WhisperForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.decoder.layer_norm.weight, std=3.0)  # some tokens are clearly more probable
    model.generation_config = transformers.GenerationConfig(
        **{name: value for name, value in BART_SIZES.items() if name.endswith("token_id")},
        is_multilingual=True, lang_to_id={"<|en|>": 5}, task_to_id={"transcribe": 6}, no_timestamps_token_id=90,
    )  # fmt: skip
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=NUM_MEL_BINS).save_pretrained(folder)
    write_word_tokenizer(folder)
    return folder


def noise(path: Path) -> Path:
    """Five seconds."""
    samples = np.random.default_rng(0).normal(0, 3000, 5 * 16_000).astype(np.int16)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, len(samples), "NONE", ""))
        file.writeframes(samples.tobytes())
    return path


@pytest.mark.slow
@pytest.mark.full
def test_turns_through_both_ways_are_compared(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    sizes = (
        "--threads",
        "1",
        "--turns",
        "2",
        "--context",
        "512",
        "--result",
        "10",
        "--load",
        "1",
        "--load-length",
        "64",
    )
    options = ("--model", str(folder), "--load-format", "dummy", "--json", str(tmp_path / "out.json"))
    assert "| turn |" in run_program("responses.py", *sizes, *options)
    turns = json.loads((tmp_path / "out.json").read_text())["turns"]
    assert turns["With load"]["responses"][1]["source"] == "lease"
    assert turns["With load"]["chat"][1]["cached_tokens"] == 0


FAKE_VLLM = '''
"""In the place of vLLM: an answer by a schema has as many tokens as the schema's title has letters, if it may."""
from types import SimpleNamespace as Answer

class SamplingParams:
    def __init__(self, temperature, max_tokens, seed=None, ignore_eos=False, detokenize=True, structured_outputs=None):
        self.length, self.reason = max_tokens, "length"
        if structured_outputs and len(structured_outputs.json["title"]) < max_tokens:
            self.length, self.reason = len(structured_outputs.json["title"]), "stop"

class LLM:
    def __init__(self, enable_prefix_caching, **settings):
        assert not enable_prefix_caching

    def generate(self, prompts, params, use_tqdm):
        params = params if isinstance(params, list) else [params] * len(prompts)
        return [Answer(outputs=[Answer(token_ids=[1] * one.length, finish_reason=one.reason)]) for one in params]
'''


def test_vllm_gets_the_same_schemas_and_then_free_answers_of_the_same_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "packages" / "vllm"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text(FAKE_VLLM)
    parameters = "from types import SimpleNamespace as StructuredOutputsParams\nBeamSearchParams = None"
    (fake / "sampling_params.py").write_text(parameters)
    monkeypatch.setenv("PYTHONPATH", str(fake.parent))
    monkeypatch.syspath_prepend(REPOSITORY / "bench")
    module = importlib.import_module("structured_parts.peer")
    monkeypatch.setattr(module, "CACHE_FOLDER", tmp_path)
    peer = module.VllmPeer(sys.executable, str(tmp_path), 1)
    try:
        peer.start([1, 2, 3])
        found = peer.measure_round([{"title": "one"}, {"title": "one longer than that"}], [[1, 2], [3, 4]], 8)
    finally:
        peer.close()
    assert found["tokens"] == 3 + 8 and found["ended"] == 1
    assert found["structured_seconds"] > 0 and found["free_seconds"] > 0


@needs_embedded_model
@pytest.mark.slow
@pytest.mark.full
def test_structured_output_is_compared_with_free_text(tmp_path: Path) -> None:
    sizes = ("--rounds", "1", "--tokens", "16", "--prompt-tokens", "8", "--json", str(tmp_path / "out.json"))
    shown = run_program("structured.py", "--parts", "load,compile", *sizes)
    assert "median share" in shown and "longest time between tokens" in shown
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["load"]["ratoon"]["rounds"][0]["tokens"] > 32
    assert len(found["compile"]["compile"]) == 10


@pytest.mark.slow
@pytest.mark.full
def test_agents_traffic_gives_the_same_answers_with_and_without_tiers_and_sessions() -> None:
    """The program compares the answers itself."""
    sizes = ("--random", "tiny", "--sessions", "4", "--turns", "4", "--pause", "0.01", "--host", "8MiB")
    shown = run_program("agent_replay.py", *sizes)
    assert [line.split(" | ")[0] for line in shown.splitlines()[3:]] == [
        "| device only, LRU", "| device only, sessions", "| tiers, LRU", "| tiers, sessions",
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.slow
def test_rerank_compares_scores_and_times_with_transformers(tmp_path: Path) -> None:
    written = tmp_path / "rerank.json"
    shown = run_program("rerank.py", "--quick", "--threads", "1", "--rounds", "1", "--json", str(written))
    assert "all passages" in shown and "one passage" in shown
    parts = json.loads(written.read_text())["parts"]
    assert set(parts) == {"auto", "float32", "int8"}
    for result in parts.values():
        assert result["ratios"]["all"]["transformers"]["median"] > 0


@pytest.mark.slow
@pytest.mark.full
def test_watching_is_compared_with_not_watching_over_a_shape_with_random_weights(tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path / "tiny")
    config = json.loads((shape / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps({**config, "vocab_size": 600, "max_position_embeddings": 2048}))
    options = ("--model", str(shape), "--requests", "2", "--input", "8", "--output", "32", "--rounds", "1")
    shown = run_program("console_stream.py", *options, "--threads", "1", "--json", str(tmp_path / "out.json"))
    assert shown.startswith("tiny, cpu, float32, 1 threads")
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["ratios"]) == 1 and found["num_events"] > 0


@needs_embedded_model
@pytest.mark.slow
@pytest.mark.full
def test_the_first_paint_of_the_console_is_timed(tmp_path: Path) -> None:
    with browser():  # or the test is skipped
        pass
    shown = run_program("console_paint.py", "--opens", "2", "--json", str(tmp_path / "out.json"))
    assert "First contentful paint in milliseconds, 2 opens" in shown
    times = json.loads((tmp_path / "out.json").read_text())["first_contentful_paint_ms"]
    assert [len(times[kind]) for kind in ("cold", "warm")] == [2, 2] and min(*times["cold"], *times["warm"]) > 0
