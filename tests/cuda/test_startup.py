"""What start-up leaves for the first requests to wait for: no kernel is compiled then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ratoon import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODEL = Path(__file__).parents[2] / "bench" / "gpu" / "models" / "qwen3-0.6b"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer": True, "device": "cuda", "max_model_len": 2048}
    with LLM(str(MODEL), **settings) as llm:
        yield llm


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that are compiled, or read from Triton's cache, from here on."""
    from triton import knobs

    names: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **details: names.append(src.fn.__name__))
    return names


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 5, 16, 40, 200, 500, 1500])
def test_a_first_request_finds_its_kernels_compiled(
    llm: LLM, compiled: list[str], length: int, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=3, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([[7] * length], params, progress=False)
    assert len(output.outputs[0].token_ids) == 3
    assert not compiled
