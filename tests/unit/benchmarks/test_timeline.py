"""`ratoon bench profile`: what counts as work, one clock for host and device, and the whole command on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratoon.benchmarks.timeline.measure import Timeline
from ratoon.benchmarks.timeline.spans import (
    ATTENTION,
    BETWEEN,
    CORE,
    DEVICE,
    KERNELS,
    OUTPUTS,
    PARTS,
    PLANNING,
    PREPARATION,
    PRODUCTS,
    REST,
    ROWS,
    SAMPLING,
    STEPS,
    WAIT,
    Span,
    SpanRecorder,
    busy_time,
    parts_of_steps,
)
from ratoon.benchmarks.timeline.trace import MARKER, device_spans, shift_events, write_trace
from ratoon.cli import main
from ratoon.layers.native import library
from ratoon.layers.native.recording import Program

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 100,
    "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip


def test_overlapping_work_counts_once_and_waiting_not_at_all() -> None:
    spans = [
        Span(DEVICE, "a", 0.0, 10.0),
        Span(DEVICE, "b", 5.0, 12.0),  # another stream
        Span(DEVICE, "c", 20.0, 40.0),
        Span(CORE, WAIT, 0.0, 30.0),
        Span(CORE, "plan", 30.0, 31.0),
    ]
    assert busy_time(spans, DEVICE, 2.0, 30.0) == 10.0 + 10.0
    assert busy_time(spans, CORE, 0.0, 40.0) == 1.0
    assert busy_time(spans, STEPS, 0.0, 40.0) == 0.0


def test_the_share_is_of_a_step_that_was_not_recorded() -> None:
    spans = [Span(DEVICE, "kernel", 0.0, 600.0), Span(DEVICE, "kernel", 1000.0, 1600.0)]
    timeline = Timeline(1, 2, 800e-6, 1000e-6, spans, [], 0.0, 2000.0)
    assert timeline.share(DEVICE) == pytest.approx(600 / 800)
    assert timeline.as_dict()["device_busy"] == pytest.approx(0.75)
    assert Timeline(1, 2, 500e-6, 1000e-6, spans, [], 0.0, 2000.0).share(DEVICE) == 1.0
    assert Timeline(1, 2, 500e-6, 1000e-6, [], [], 0.0, 2000.0).as_dict()["device_busy"] is None, "on a CPU"


def test_a_step_of_a_cpu_is_divided_by_kind_of_work() -> None:
    spans = [
        Span(CORE, "plan", 0.0, 3.0),
        Span(CORE, WAIT, 3.0, 90.0),
        Span(STEPS, "prepare", 10.0, 12.0),
        Span(KERNELS, "ratoon_rms_norm", 15.0, 16.0),
        Span(KERNELS, "ratoon_quantised_linear", 16.0, 36.0),
        Span(KERNELS, "ratoon_attention", 36.0, 46.0),
        Span(STEPS, "launch", 10.0, 50.0),
        Span(KERNELS, "ratoon_linear", 55.0, 70.0),  # the head
        Span(KERNELS, "ratoon_draw", 72.0, 76.0),
        Span(STEPS, "sample", 50.0, 80.0),
        Span(CORE, "update", 90.0, 91.0),
        Span(CORE, "outputs", 91.0, 95.0),
        Span(KERNELS, "ratoon_linear", 99.0, 120.0),  # of the next step
    ]
    parts = parts_of_steps(spans, 0.0, 100.0)
    assert list(parts) == list(PARTS)
    assert parts == {
        PRODUCTS: 35.0, ATTENTION: 10.0, ROWS: 1.0, BETWEEN: 40.0 - 2.0 - 31.0, SAMPLING: 4.0 + 30.0 - 19.0,
        PREPARATION: 2.0, PLANNING: 4.0, OUTPUTS: 4.0, REST: 100.0 - 78.0,
    }  # fmt: skip


def test_events_of_the_device_are_shifted_to_the_clock_of_the_host(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0},
        {"ph": "X", "cat": "user_annotation", "name": MARKER, "ts": 800.0, "dur": 90.0},
        {"ph": "X", "cat": "user_annotation", "name": MARKER, "ts": 1000.0, "dur": 1.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1500.0, "dur": 20.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1400.0, "dur": 3.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "ts": 1600.0, "dur": 5.0},
    ]
    shifted = shift_events(events, marked_at=50.0)
    assert device_spans(shifted) == [Span(DEVICE, "gemm", 550.0, 570.0), Span(DEVICE, "copy", 650.0, 655.0)]
    write_trace(tmp_path / "trace.json", [Span(STEPS, "launch", 540.0, 548.0)], shifted)
    written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    times = {event["name"]: event["ts"] for event in written if event["ph"] == "X"}
    assert times == {"launch": 540.0, "gemm": 550.0, "cudaLaunchKernel": 450.0, "copy": 650.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def options(model: Path, folder: Path) -> list[str]:
    engine = ["--device", "cpu", "--threads", "1", "--load-format", "dummy", "--num-blocks", "100"]
    return ["bench", "profile", str(model), *engine, "--output", str(folder), "--input-len", "8", "--max-num-seqs", "4"]


@pytest.mark.slow  # a process of its own, or an engine
def test_a_run_writes_a_trace_and_a_picture_of_each_batch(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main([*options(model, tmp_path), "--batches", "1,3", "--prompts", "100", "--steps", "5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(batch["batch"], batch["prompt_len"]) for batch in result["batches"]] == [(1, None), (3, None), (1, 100)]
    assert all(0 < batch["steps_thread_busy"] <= 1 and batch["device_busy"] is None for batch in result["batches"])
    for batch in result["batches"]:
        parts = batch["parts_ms"]
        assert list(parts) == list(PARTS)
        assert all(parts[part] > 0 for part in (PRODUCTS, ATTENTION, ROWS, PREPARATION, SAMPLING, PLANNING))
        assert sum(parts.values()) == pytest.approx(batch["recorded_step_ms"], rel=0.5)
    kernels = json.loads((tmp_path / "prefill-100.json").read_text())["traceEvents"]
    assert sum(event["name"] == "attention" for event in kernels) == TINY["num_hidden_layers"]
    assert (tmp_path / "prefill-100.png").stat().st_size > 5_000
    for name in ("batch-1", "batch-3"):
        events = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
        counts = {
            label: sum(event["name"] == label for event in events) for label in ("plan", "launch", WAIT, "update")
        }
        assert counts[WAIT] == 5 and counts["update"] == 5 and counts["launch"] >= 4, counts
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000


def test_the_engine_is_as_before_when_recording_has_ended(model: Path) -> None:
    from ratoon import LLM, SamplingParams

    with LLM(str(model), device="cpu", num_threads=1, load_format="dummy", skip_tokenizer=True, num_blocks=100) as llm:
        core = llm.engine.client.core
        recorder = SpanRecorder()
        with recorder.recording(llm):
            assert "submit" in vars(core.executor)
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), progress=False)
        assert {span.lane for span in recorder.spans} == {STEPS, CORE, KERNELS}
        replaced = {"schedule", "update_from_output", "process_outputs", "execute_model", "sample_tokens", "submit"}
        assert not replaced & (vars(core.scheduler).keys() | vars(core.executor).keys() | vars(llm.engine).keys())
        kernels = library()
        assert kernels is not None and all(vars(kernels)[name] is call for name, call in kernels.functions.items())
        assert Program.run.__qualname__ == "Program.run"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batches", "1,x"], "--batches"),
        (["--batches", "5"], "max_num_seqs"),
        (["--steps", "0"], "--steps"),
        (["--prompts", "8,x"], "--prompts"),
        (["--batches", "1", "--prompts", "128"], "at most 127"),
        (["--batches", "1", "--steps", "100"], "128 at most"),
    ],
)
def test_sizes_that_can_not_be_measured_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([*options(model, tmp_path), *words]) != 0
    assert message in capsys.readouterr().err
