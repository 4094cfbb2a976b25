"""What files hold reaches the layers as it is stored, whole or in part; Ops decides what becomes floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from ratoon.layers.ops import Product, WeightFormat
from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import Destination, TensorRequest, TensorSource, read_tensor
from ratoon.models.base import LanguageModel
from ratoon.models.build import build_model, collect_shapes
from ratoon.models.dummy_source import DummySource
from ratoon.models.gguf_source import GGUFSource
from ratoon.models.safetensors_source import SafetensorsSource
from ratoon.models.source import resolve_model
from tests.golden.dense_step import dense_logits
from tests.unit.models.model_files import llama_metadata, write_gguf

Tensor = torch.Tensor
CPU = torch.device("cpu")
HIDDEN, INTERMEDIATE, KV_ROWS, VOCABULARY = 64, 96, 32, 50
QUANTISED = {"attn_q": Type.Q4_0, "attn_k": Type.Q4_0, "attn_v": Type.Q8_0, "attn_output": Type.Q4_0,
             "ffn_gate": Type.Q4_0, "ffn_up": Type.Q4_0, "ffn_down": Type.Q8_0}  # fmt: skip


def random(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 8


def quantised_file(path: Path) -> Path:
    """A Llama of one layer in two block formats, with float norms."""
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (KV_ROWS, HIDDEN), "attn_v": (KV_ROWS, HIDDEN),
              "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INTERMEDIATE, HIDDEN), "ffn_up": (INTERMEDIATE, HIDDEN),
              "ffn_down": (HIDDEN, INTERMEDIATE)}  # fmt: skip
    tensors: dict = {"token_embd.weight": (quantise(random(VOCABULARY, HIDDEN, seed=9), Type.Q8_0), Type.Q8_0)}
    for seed, (name, shape) in enumerate(shapes.items()):
        type = QUANTISED[name]
        tensors[f"blk.0.{name}.weight"] = (quantise(random(*shape, seed=seed), type), type)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        tensors[f"{name}.weight"] = 1 + random(HIDDEN, seed=20)
    changes = {"embedding_length": HIDDEN, "block_count": 1, "feed_forward_length": INTERMEDIATE,
               "rope.dimension_count": 16}  # fmt: skip
    return write_gguf(path, "llama", llama_metadata(**changes), tensors)


def quantise(numbers: np.ndarray, type: Type) -> np.ndarray:
    return gguf.quants.quantize(numbers, type)


class BlockFormat:
    """Multiplies by weights that it keeps in blocks, which it decodes for every product."""

    def __init__(self) -> None:
        self.kept: list[StoredTensor] = []
        self.num_products = 0

    def make_linear(self, parts: Sequence[StoredTensor], bias: Tensor | None) -> Product:
        self.kept += parts

        def multiply(x: Tensor) -> Tensor:
            self.num_products += 1
            return torch.nn.functional.linear(x, torch.cat([part.floats() for part in parts]), bias)

        return multiply

    def make_embedding(self, table: StoredTensor) -> Callable[[Tensor], Tensor]:
        self.kept.append(table)
        return lambda ids: table.floats()[ids]


class BlockOps(TorchOps):
    """Keeps one format."""

    def __init__(self, name: str) -> None:
        self.format_name = name
        self.format = BlockFormat()

    def find_format(self, stored: StoredTensor) -> WeightFormat | None:
        return self.format if stored.format == self.format_name else None


def build(path: Path, ops: TorchOps) -> LanguageModel:
    source = resolve_model(str(path))
    return build_model(source.config, source.tensors, ops, CPU, torch.float32)


@pytest.mark.parametrize(("format", "num_kept", "num_products"), [("Q4_0", 5, 3), ("Q8_0", 3, 3)])
def test_blocks_reach_the_layer_undecoded_and_their_own_product_is_used(
    format: str, num_kept: int, num_products: int, tmp_path: Path
) -> None:
    """Of one format or the other: q, k and v as well as gate·up and down are mixed, and the head is the embedding."""
    path = quantised_file(tmp_path / "m.gguf")
    ops = BlockOps(format)
    model, reference = build(path, ops), build(path, TorchOps())
    kept = ops.format.kept
    assert all(part.data.dtype == torch.uint8 and part.decode is not None for part in kept)
    expected = dense_logits(reference, [3, 7, 1, 40])
    torch.testing.assert_close(dense_logits(model, [3, 7, 1, 40]), expected, atol=1e-5, rtol=1e-5)
    assert (len(set(map(id, kept))), ops.format.num_products) == (num_kept, num_products)


def test_without_a_format_for_them_blocks_become_floats_of_the_model(tmp_path: Path) -> None:
    source = GGUFSource(quantised_file(tmp_path / "m.gguf"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert source.read(name).format == "Q4_0"
    for ops, as_stored in ((TorchOps(), True), (BlockOps("Q4_0"), False)):
        floats = read_tensor(source, ops, TensorRequest(name, as_stored=as_stored))
        assert floats.format == "F32" and torch.equal(floats.data, source.read(name).floats())


def test_blocks_are_kept_through_two_transpositions_and_not_through_one(tmp_path: Path) -> None:
    """GPT-2's checkpoints have [in, out], its GGUF files [out, in]: what a layer wants is stored as it wants it."""
    metadata = {"gpt2." + key: value for key, value in {
        "context_length": 32, "embedding_length": HIDDEN, "feed_forward_length": INTERMEDIATE, "block_count": 1,
        "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5,
    }.items()}  # fmt: skip
    numbers = random(INTERMEDIATE, HIDDEN, seed=1)
    tensors = {"token_embd.weight": random(VOCABULARY, HIDDEN, seed=2),
               "blk.0.ffn_up.weight": (quantise(numbers, Type.Q8_0), Type.Q8_0)}  # fmt: skip
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", "gpt2", metadata, tensors))
    name, ops = "transformer.h.0.mlp.c_fc.weight", BlockOps("Q8_0")
    stored = source.read(name)
    assert stored.shape == source.shapes()[name] == (HIDDEN, INTERMEDIATE)
    as_layer_has_it = read_tensor(source, ops, TensorRequest(name, transposed=True, as_stored=True))
    assert (as_layer_has_it.format, as_layer_has_it.shape) == ("Q8_0", (INTERMEDIATE, HIDDEN))
    assert read_tensor(source, ops, TensorRequest(name, as_stored=True)).format == "F32"
    assert torch.equal(stored.floats().t(), as_layer_has_it.floats())
    half = TensorSlice(1, 32, 96)  # of the checkpoint's columns: rows of the file
    assert torch.equal(source.read(name, half).floats(), stored.floats()[:, 32:])
    assert source.read(name, half).format == "Q8_0"


@pytest.mark.parametrize(
    ("name", "part", "format"),
    [
        ("mlp.down_proj", TensorSlice(0, 10, 30), "Q8_0"),
        ("mlp.down_proj", TensorSlice(1, 32, 96), "Q8_0"),
        ("mlp.down_proj", TensorSlice(1, 0, 48), "F32"),  # half of a block can't be kept
        ("self_attn.q_proj", TensorSlice(0, 16, 48), "Q4_0"),  # rows that the converter has reordered by heads
        ("input_layernorm", TensorSlice(0, 5, 9), "F32"),
    ],
)
def test_a_part_of_a_gguf_tensor_is_that_part_of_its_numbers(
    name: str, part: TensorSlice, format: str, tmp_path: Path
) -> None:
    source = GGUFSource(quantised_file(tmp_path / "m.gguf"))
    found = source.read(f"model.layers.0.{name}.weight", part)
    assert found.format == format
    assert torch.equal(found.floats(), source.read(f"model.layers.0.{name}.weight").floats()[part.slices()])


@pytest.mark.parametrize("part", [TensorSlice(0, 1, 3), TensorSlice(1, 2, 6)])
def test_a_part_of_other_sources_tensors_is_that_part(part: TensorSlice, tmp_path: Path) -> None:
    save_file({"w": torch.randn(4, 6, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    sources: list[TensorSource] = [SafetensorsSource(tmp_path), DummySource({"w": (4, 6)})]
    for source in sources:
        whole, found = source.read("w"), source.read("w", part)
        assert torch.equal(found.data, whole.data[part.slices()]) and found.shape == found.data.shape
        assert found.format == whole.format


def test_a_models_requests_are_the_same_when_it_is_compared_and_when_it_is_read(tmp_path: Path) -> None:
    """What is read ahead is what is asked for, in order: otherwise a tensor is read twice."""
    source = resolve_model(str(quantised_file(tmp_path / "m.gguf")))
    reads: list[str] = []

    class Counted:
        name = "counted"
        shapes = source.tensors.shapes

        def read(
            self, name: str, part: TensorSlice | None = None, destination: Destination | None = None
        ) -> StoredTensor:
            reads.append(name)
            return source.tensors.read(name, part, destination)

    build_model(source.config, Counted(), TorchOps(), CPU, torch.float32)
    assert sorted(reads) == sorted(collect_shapes(source.config))
