"""Which kernels requests of other kinds need, beside those that are compiled before the first one and behind it: none.
Without a GPU, and without compiling."""

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
import json, sys
import numpy as np
import torch
import triton
from triton.runtime import driver
from ratoon.attention import triton_backend
from ratoon.core.config import SchedulerConfig
from ratoon.core.kv import KVCacheConfig
from ratoon.execution.passes import compile_ahead
from ratoon.execution.passes.compile_ahead import ShapesOnly, capture_nothing
from ratoon.execution.kv.geometry import geometry_of
from ratoon.execution.passes.ends import BeamKeys, Logits, Tokens
from ratoon.execution.passes.graphs import PaddedEnd, ProgramKey
from ratoon.execution.kv.kv_memory import largest_step, num_blocks_of
from ratoon.execution.model_runner import ModelRunner
from ratoon.layers.beams import SearchRows, SearchShape, best_keys_of_searches
from ratoon.layers.cuda_ops import CudaOps
from ratoon.layers.sampling import Mode, greedy, sample_plain, token_logprobs
from ratoon.layers.triton.compilation import launches_go_to
from ratoon.layers.triton.compiler_process import encode
from ratoon.layers.triton.kernel_requests import AbsentDevice, request_of_compilation
from ratoon.models.build import META, collect_shapes, declare_model, outline_model
from ratoon.models.dummy_source import DummySource
from ratoon.models.source import resolve_model

triton_backend.num_multiprocessors = lambda device: 132
driver.set_active(AbsentDevice(90))
config = resolve_model(sys.argv[1]).config
max_len = 4096
tensors = DummySource(collect_shapes(config))
geometry = geometry_of(declare_model(config, max_len), "torch", 16, torch.device("cpu"), torch.bfloat16, None, False)
largest = largest_step(SchedulerConfig(max_num_batched_tokens=4096, max_num_seqs=256), [16], max_len)
cache = KVCacheConfig(num_blocks_of(largest), 16, geometry.groups)


class Kernels(triton.AsyncCompileMode):
    def __init__(self):
        super().__init__(None)
        self.stage, self.names, self.found = "", {}, {}

    def submit(self, key, compile_fn, finalize_fn):
        encode(request_of_compilation(key, compile_fn, is_urgent=True))  # can be sent to the process that compiles
        if key not in self.found:
            self.found[key] = self.stage
            self.names.setdefault(self.stage, []).append(self.name)

    def record(self, kernel, launch, args, options):
        self.name = kernel.fn.__name__
        weights = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 2 and len(arg) == 6144]
        assert all(weight.dtype == torch.bfloat16 for weight in weights), "of parts that are joined"
        launch(kernel, *args, grid=(1,), warmup=True, **options)


kernels = Kernels()
with torch.inference_mode(), ShapesOnly(), kernels, launches_go_to(kernels.record):
    model = outline_model(config, tensors, CudaOps(), torch.bfloat16, max_len)

    def make_runner():
        return ModelRunner(
            model, [triton_backend.TritonAttentionBackend()], cache, dtype=torch.bfloat16, device=META,
            max_model_len=max_len, max_num_reqs=256, max_num_tokens=4096, inputs_on_device=True,
            capture=capture_nothing,
        )

    kernels.stage = "first"
    compile_ahead.launch_first_steps(make_runner(), largest)
    kernels.stage = "later"
    compile_ahead.launch_later_steps(make_runner())
    runner = make_runner()

    def key_of(size, num_reqs, num_rows, mode=None, searches=None):
        end = Tokens(mode) if mode is not None else Logits() if searches is None else BeamKeys(searches)
        return ProgramKey(size, num_reqs, (PaddedEnd(end, num_rows),))

    def run(stage, *keys):
        kernels.stage = stage
        for key in keys:
            runner.graphs.clear()
            runner.graphs.run(key_of(*key))

    def run_requests(*requests):
        compile_ahead._launch_step(runner, compile_ahead.step_of(requests, [16]))

    run("decode", *((size, None, None, Mode.GREEDY) for size in (1, 2, 8, 16, 32, 48, 128, 256)))
    run("continuation", (8, 2, 1, Mode.GREEDY), (24, 2, 1, Mode.GREEDY), (64, 33, 8, Mode.RANDOM), (96, 9, 1))
    run("few tokens", (8, 8, 8, Mode.GREEDY), (16, 9, 16, Mode.GREEDY), (128, 33, 128, Mode.RANDOM))
    run("prompts", (160, 128, 8, Mode.GREEDY))
    run_requests(*[(0, 300)] * 8, (700, 1), (700, 5))
    run_requests((0, 3500), *[(700, 1)] * 3)
    run("beams", (16, None, None, None, SearchShape(2, 8, 16)))
    for num_beams in (32, 4):
        for wanted in (2 * num_beams, num_beams, 4 * num_beams):  # with one stop token, none, two
            run("beams", (96, 8, 1, None, SearchShape(1, 1, wanted)),
                (num_beams, None, None, None, SearchShape(1, num_beams, wanted)))
    for rows, searches, wanted in ((1, 11, 64), (32, 32, 64), (32, 32, 32), (32, 5, 96)):
        logits = torch.empty(rows * searches, config.vocab_size, dtype=torch.bfloat16, device=META)
        scores = torch.empty(rows * searches, device=META)
        parts = [SearchRows(rows * place, rows * (place + 1), wanted) for place in range(searches)]
        best_keys_of_searches(logits, scores, parts)
    kernels.stage = "greedy"
    greedy(torch.empty(3, config.vocab_size, dtype=torch.bfloat16, device=META))
    run("sampling", (1, None, None, Mode.FILTERED), (32, None, None, Mode.FILTERED), (16, 8, 1, Mode.FILTERED))
    kernels.stage = "logprobs"
    for rows in (1, 3, 32):
        logits = torch.empty(rows, config.vocab_size, dtype=torch.bfloat16, device=META)
        for num_top in (0, 1, 5, 20):
            token_logprobs(logits, torch.empty(rows, dtype=torch.int64, device=META), num_top)
    kernels.stage = "rules"
    for rows in (1, 3):
        logits = torch.empty(rows, config.vocab_size, device=META)  # changed by rules: float32
        numbers = [torch.empty(rows, dtype=dtype, device=META) for dtype in (torch.float32, torch.int64, torch.float64)]
        for mode in Mode:
            sample_plain(logits, *numbers, numbers[0], numbers[2], mode)
print(json.dumps(kernels.names))
"""
MODEL = Path(__file__).parents[3] / "bench" / "gpu" / "models" / "qwen3-0.6b"
LATER = {
    "_copy_block",
    "_copy_blocks",
    "_list_logprobs",
    "_merge_parts",
    "_rank_keys",
    "attention_kernel",
    "list_largest",
}


@pytest.mark.full
@pytest.mark.slow
def test_requests_of_other_kinds_find_their_kernels_compiled() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(MODEL)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "can't be captured" not in done.stderr
    names = json.loads(done.stdout)
    first, later = names.pop("first"), names.pop("later")
    assert set(later) >= LATER
    assert names == {}, "kernels that a request would wait for"
    # Each of the first is waited for at the start, and the others take a core for a second or more.
    assert first.count("attention_kernel") <= 3 and (first + later).count("attention_kernel") <= 10
    assert (first + later).count("decode_kernel") <= 6
