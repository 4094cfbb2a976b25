"""What start-up leaves for the first requests: kernels are compiled before they are launched."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

from ratoon import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MODEL = Path(__file__).parents[2] / "bench" / "gpu" / "models" / "qwen3-0.6b"
FEWEST = 10  # kernels that a step launches


def test_kernels_are_compiled_before_the_first_request(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"load_format": "dummy", "skip_tokenizer": True, "device": "cuda", "max_model_len": 2048}
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
    with caplog.at_level(logging.INFO, "ratoon.execution.compile_ahead"), LLM(str(MODEL), **settings) as llm:
        found = re.search(r"(\d+) kernels were compiled ahead", caplog.text)
        assert found and int(found[1]) >= FEWEST, caplog.text
        assert "compile kernels" in llm.startup_timer.as_dict()
        (output,) = llm.generate([[7] * 16], params, progress=False)
        assert len(output.outputs[0].token_ids) == 3
