"""What start-up leaves for the first requests: kernels are compiled before they are launched."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ratoon import LLM, SamplingParams
from ratoon.execution.passes.cuda_driver import MIN_CORES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MODEL = Path(__file__).parents[2] / "bench" / "gpu" / "models" / "qwen3-0.6b"
FEWEST = 10  # kernels that a step launches
SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer": True, "device": "cuda", "max_model_len": 2048,
    "kv_memory_fraction": 0.1,  # other tests use the device too
}  # fmt: skip


def test_kernels_are_compiled_before_the_first_request(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
    with caplog.at_level(logging.INFO, "ratoon.execution.passes.compile_ahead"), LLM(str(MODEL), **SETTINGS) as llm:
        found = re.search(r"(\d+) kernels were compiled ahead", caplog.text)
        assert found and int(found[1]) >= FEWEST, caplog.text
        assert "compile kernels" in llm.startup_timer.as_dict()
        (output,) = llm.generate([[7] * 16], params, progress=False)
        assert len(output.outputs[0].token_ids) == 3


# In a process of its own: in this one the kernels of other tests are loaded. Also on all cores: a test process that has
# two has no other one compile for it.
LATER = """
import json, os, sys, time
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, range(os.cpu_count()))
from triton import knobs
from ratoon import LLM, BeamSearchParams, SamplingParams
from ratoon.execution.worker import Worker

workers, make = [], Worker.__init__
Worker.__init__ = lambda self, *args: (make(self, *args), workers.append(self))[0]
with LLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
    short = {"max_tokens": 3, "ignore_eos": True, "detokenize": False}
    llm.generate([[7] * 700], SamplingParams(temperature=0.0, **short), progress=False)
    end = time.monotonic() + 120
    while not workers[0]._kernels.has_ended and time.monotonic() < end:
        time.sleep(0.1)
    assert workers[0]._kernels.has_ended, "kernels are still being compiled"
    compiled = []
    knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or compiled.append(src.fn.__name__)
    llm.generate([[7] * 705], SamplingParams(temperature=0.0, **short), progress=False)
    llm.generate([[7] * 50] * 32, SamplingParams(temperature=0.8, top_k=20, top_p=0.9, **short), progress=False)
    llm.generate([[7] * 50], SamplingParams(temperature=0.0, logprobs=5, **short), progress=False)
    llm.generate([[7] * 50], SamplingParams(temperature=0.7, frequency_penalty=0.5, **short), progress=False)
    for num_searches in (1, 32):
        llm.beam_search([[7] * 700] * num_searches, BeamSearchParams(beam_width=32, n=32, **short), progress=False)
    print(json.dumps(compiled))
"""


@pytest.mark.long
@pytest.mark.skipif((os.cpu_count() or 1) < MIN_CORES, reason="nothing is compiled ahead for later steps")
def test_a_first_request_of_another_kind_finds_its_kernels_compiled(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATER, str(MODEL), json.dumps(SETTINGS)],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
