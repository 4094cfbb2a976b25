"""Kernels that are compiled before the first step: which ones, without a GPU and without compiling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# In a process of its own: here kernels may be those of Triton's interpreter, which are launched in another way.
PROGRAM = """
import gc, json, sys
import torch
from ratoon.attention.triton_backend import TritonAttentionBackend
from ratoon.core.config import SchedulerConfig
from ratoon.core.kv import KVCacheConfig
from ratoon.execution.passes.compile_ahead import ShapesOnly, capture_nothing, launch_first_steps
from ratoon.execution.kv.geometry import geometry_of
from ratoon.execution.kv.kv_memory import largest_step, num_blocks_of
from ratoon.execution.model_runner import ModelRunner
from ratoon.layers.cuda_ops import CudaLinear, CudaOps
from ratoon.layers.triton.compilation import launches_go_to
from ratoon.models.build import META, collect_shapes, declare_model, outline_model
from ratoon.models.dummy_source import DummySource
from ratoon.models.source import resolve_model

config = resolve_model(sys.argv[2]).config
quantization = sys.argv[1] or None
tensors = DummySource(collect_shapes(config))
geometry = geometry_of(declare_model(config, 64), "torch", 16, torch.device("cpu"), torch.bfloat16, None, False)
largest = largest_step(SchedulerConfig(max_num_batched_tokens=1024, max_num_seqs=8), [16], 64)
names = []
modules = set(sys.modules)
record = lambda kernel, launch, args, options: names.append(kernel.fn.__name__)
with torch.inference_mode(), ShapesOnly(), launches_go_to(record):
    model = outline_model(config, tensors, CudaOps(quantization=quantization), torch.bfloat16, 64)
    weights = {linear.weight.dtype for linear in gc.get_objects() if isinstance(linear, CudaLinear)}
    runner = ModelRunner(
        model,
        [TritonAttentionBackend()],
        KVCacheConfig(num_blocks_of(largest), 16, geometry.groups),
        dtype=torch.bfloat16,
        device=META,
        max_model_len=64,
        max_num_reqs=8,
        max_num_tokens=1024,
        inputs_on_device=True,
        capture=capture_nothing,
    )
    launch_first_steps(runner, largest)
print(json.dumps([sorted(set(names)), sorted(set(sys.modules) - modules), sorted(map(str, weights))]))
"""
MODEL = Path(__file__).parents[3] / "bench" / "gpu" / "models" / "qwen3-0.6b"
EXPECTED = {
    "_activation_kernel",
    "_append_tokens",
    "_gemv_kernel",
    "_pick",
    "_prepare",
    "_reduce_chunks",
    "_rms_norm_kernel",
    "_receive",
    "attention_kernel",
    "store_kernel",
}


@pytest.mark.parametrize("quantization", ["", "fp8"])
@pytest.mark.slow
@pytest.mark.one_in(2)
def test_the_kernels_of_the_first_steps_are_found_without_a_gpu_and_without_memory(quantization: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, quantization, str(MODEL)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    names, imported, dtypes = json.loads(done.stdout)
    expected = EXPECTED - {"_activation_kernel"} | {"_quantize_kernel"} if quantization == "fp8" else EXPECTED
    assert set(names) >= expected
    # Which kernel multiplies by a weight depends on it. The head is not quantised.
    assert (
        dtypes == ["torch.bfloat16", "torch.float8_e4m3fn"] if quantization == "fp8" else dtypes == ["torch.bfloat16"]
    )
    compilers = [name for name in imported if name.startswith(("torch._dynamo", "sympy"))]
    # Seconds of a start. What quantises weights does import it.
    assert not compilers or quantization == "fp8", "torch's own compiler was imported"


@pytest.mark.slow
@pytest.mark.full
def test_the_kernels_for_any_batch_are_found_too() -> None:
    program = PROGRAM.replace(
        "CudaOps(quantization=quantization)", "CudaOps(ProductChoices(has_wgmma=True), batch_invariant=True)"
    ).replace("[TritonAttentionBackend()]", "[TritonAttentionBackend(batch_invariant=True)]")
    program = "from ratoon.layers.product_choices import ProductChoices\n" + program
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", program, "", str(MODEL)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    names = set(json.loads(done.stdout)[0])
    assert names >= {"_panel_kernel", "_stream_kernel", "_factors_kernel", "_wide_kernel", "attention_kernel"}
    assert "tiled_decode_kernel" in names and not names & {"_gemv_kernel", "_matmul_kernel", "decode_kernel"}


# Shapes whose layers all have pages of keys and values; gemma3-4b has heads that are too wide for the kernel.
WITH_ORDINARY_PAGES = ("llama3-8b", "qwen3-0.6b", "qwen2.5-vl-3b", "qwen3-30b-a3b", "gpt-oss-20b", "gemma3-4b")

# What a prompt launches on a Hopper GPU, and what is expected before torch is imported
GUESS = """
import sys
from ratoon.attention.early_kernels import expected_launches
from ratoon.core.config import EngineConfig
from ratoon.layers.triton.compile_server import request_for
from ratoon.models.source import resolve_model

configs = [resolve_model(path).config for path in sys.argv[1:]]
engine = EngineConfig(model="", dtype="bfloat16")
guesses = [[request_for(launch) for launch in expected_launches(engine, config)] for config in configs]
assert "torch" not in sys.modules

import torch
import triton
from triton.runtime import driver
from ratoon.attention.triton_backend import TritonAttentionBackend
from ratoon.core.config import SchedulerConfig
from ratoon.core.kv import KVCacheConfig
from ratoon.execution.passes.compile_ahead import ShapesOnly, _launch_prompts, capture_nothing
from ratoon.execution.kv.geometry import geometry_of
from ratoon.execution.model_runner import ModelRunner
from ratoon.layers.cuda_ops import CudaOps
from ratoon.layers.triton.compilation import launches_go_to
from ratoon.layers.triton.kernel_requests import AbsentDevice, digest_of
from ratoon.models.build import META, collect_shapes, declare_model, outline_model
from ratoon.models.dummy_source import DummySource

class Recorder(triton.AsyncCompileMode):
    def submit(self, key, compile_fn, finalize_fn):
        digests.add(digest_of(key))

for module in [module for name, module in sys.modules.items() if name.startswith("ratoon.attention.triton")]:
    for name, value in (("has_wgmma", True), ("can_launch_dependently", True), ("num_multiprocessors", 132)):
        if hasattr(module, name):
            setattr(module, name, lambda *args, value=value: value)

driver.set_active(AbsentDevice(90))

def compile_prefill(kernel, run, args, options):
    if kernel.fn.__name__ == "prefill_kernel":
        run(kernel, *args, grid=(1,), warmup=True, **options)

for config, guess in zip(configs, guesses, strict=True):
    geometry = geometry_of(declare_model(config, 512), "torch", 16, torch.device("cpu"), torch.bfloat16, None, False)
    digests = set()
    with Recorder(None), torch.inference_mode(), ShapesOnly(), launches_go_to(compile_prefill):
        model = outline_model(config, DummySource(collect_shapes(config)), CudaOps(), torch.bfloat16, 512)
        runner = ModelRunner(
            model, [TritonAttentionBackend() for _ in geometry.groups], KVCacheConfig(33, 16, geometry.groups),
            dtype=torch.bfloat16, device=META,
            max_model_len=512, max_num_reqs=8, max_num_tokens=512, inputs_on_device=True, capture=capture_nothing,
        )
        _launch_prompts(runner, (128,))
    assert digests == {request.digest for request in guess}
    assert bool(digests) == (config.head_dim <= 128)
"""


@pytest.mark.slow
@pytest.mark.full
def test_the_kernel_of_long_prompts_is_known_before_torch_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GUESS, *(str(MODEL.parent / name) for name in WITH_ORDINARY_PAGES)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
