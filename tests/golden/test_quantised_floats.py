"""Models of floats whose weights are kept in 16, 8 and 4 bits, against their own floats."""

from __future__ import annotations

import pytest
import torch

from ratoon.layers.native import library
from ratoon.layers.native_ops import NativeOps
from ratoon.layers.ops import Ops
from ratoon.layers.stored import FLOAT_FORMATS, StoredTensor, TensorSlice
from ratoon.layers.weights import Destination, TensorSource
from ratoon.models.build import build_model
from tests.golden import tiny_models
from tests.golden.dense_step import dense_logits
from tests.golden.tiny_decoder_models import DECODERS
from tests.golden.tiny_models import TinyModel, random_token_ids

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels for this processor; `make setup` builds them")

FAMILIES = {
    "llama": tiny_models.tiny_llama,
    "mistral": tiny_models.tiny_mistral,
    "qwen2": tiny_models.tiny_qwen2,
    "qwen3": tiny_models.tiny_qwen3,
    "gpt2": tiny_models.tiny_gpt2,
    **DECODERS,
}


def all_logits(tiny: TinyModel, ops: Ops, tokens: list[int]) -> torch.Tensor:
    model = build_model(tiny.config, tiny.source, ops, torch.device("cpu"), torch.float32)
    return dense_logits(model, tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("bits", "allowed"), [(8, 0.05), (4, 0.4)])
@pytest.mark.one_in(3)
def test_logits_are_near_those_of_the_floats(family: str, bits: int, allowed: float) -> None:
    tiny, tokens = FAMILIES[family](), random_token_ids(40, seed=1)
    ops = NativeOps(bits=bits)
    found, expected = all_logits(tiny, ops, tokens), tiny.oracle_logits(tokens)
    assert (found - expected).norm() < allowed * expected.norm()
    assert not torch.equal(found, all_logits(tiny, NativeOps(), tokens))
    assert {one["format"] for one in ops.kept_formats()} == ({"Q8_0"} if bits == 8 else {"Q4_1", "Q8_0"})


class Rounded:
    """A source whose numbers are rounded to a dtype of 16 bits and stored in that, or in float32."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, stored_as: torch.dtype) -> None:
        self.name, self.shapes = source.name, source.shapes
        self._source, self._dtype, self._stored_as = source, dtype, stored_as

    def read(self, name: str, part: TensorSlice | None = None, destination: Destination | None = None) -> StoredTensor:
        numbers = self._source.read(name, part).floats()
        return StoredTensor.of_floats(numbers.to(self._dtype).to(self._stored_as))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.one_in(3)
def test_weights_in_16_bits_give_the_bits_of_their_float32(family: str, dtype: torch.dtype) -> None:
    tiny, tokens = FAMILIES[family](), random_token_ids(40, seed=1)
    kept, device = NativeOps(), torch.device("cpu")
    found, expected = (
        dense_logits(build_model(tiny.config, Rounded(tiny.source, dtype, stored), ops, device, torch.float32), tokens)
        for stored, ops in ((dtype, kept), (torch.float32, NativeOps()))
    )
    assert torch.equal(found, expected)
    assert {one["format"] for one in kept.kept_formats()} == {FLOAT_FORMATS[str(dtype)]}
