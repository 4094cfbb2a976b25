"""The backend over the real FlashInfer, where it is installed: what it computes is attention by its definition."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("triton")

from ratoon.attention import flashinfer_backend
from ratoon.attention.flashinfer_backend import FlashInferBackend
from ratoon.layers.attention import AttentionLayer
from tests.unit.attention.test_backends import Batch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed"),
]


@pytest.fixture(autouse=True)
def any_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_backend, "_MIN_SCORES", 0)


def test_prompts_with_and_without_cached_tokens_are_attended_to_by_definition() -> None:
    layer = AttentionLayer(0, 4, 2, 128, 0.09)
    batch = Batch([40, 0, 300, 17], [1, 400, 65, 3], layer, 16, device="cuda", dtype=torch.bfloat16)
    for chunks, apart in ((1, False), (2, True)):
        found = batch.run(FlashInferBackend(), chunks=chunks, apart=apart)
        for got, expected in zip(found, batch.written_out(), strict=True):
            # Weights and sums of numbers around 1 in bfloat16, which has 8 bits
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.03)
