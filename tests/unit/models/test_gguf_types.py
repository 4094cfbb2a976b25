"""Every type of GGUF tensors against its definition: random blocks, decoded and multiplied as they are kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from ratoon.core.errors import ModelError
from ratoon.layers.linear import ColumnParallelLinear
from ratoon.layers.native import library
from ratoon.layers.native_ops import NativeOps
from ratoon.layers.weights import Weights
from ratoon.models.gguf_quants import LAYOUTS, TYPES
from ratoon.models.gguf_source import GGUFSource
from tests.unit.models.gguf_definitions import DEFINITIONS
from tests.unit.models.model_files import embedding_only, llama_metadata, write_gguf

ROWS, COLUMNS = 20, 512  # more rows than a panel has, two blocks of the widest types
KEPT = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"}
PLAIN = {"F32": np.float32, "F16": np.float16}
NAME = "model.layers.0.mlp.gate_proj.weight"


def random_tensor(name: str) -> tuple[np.ndarray, torch.Tensor]:
    """Bytes [rows, bytes of a row], and the numbers that they stand for [rows, columns] float64."""
    generator = np.random.default_rng(TYPES[name])
    if name in PLAIN or name == "BF16":
        numbers = generator.standard_normal((ROWS, COLUMNS)).astype(PLAIN.get(name, np.float32))
        if name == "BF16":  # the upper half of a float32
            words = (numbers.view(np.uint32) >> 16).astype(np.uint16)
            wide = (words.astype(np.uint32) << 16).view(np.float32)
            return words.view(np.uint8), torch.from_numpy(wide.astype(np.float64))
        return numbers.view(np.uint8), torch.from_numpy(numbers.astype(np.float64))
    layout, (definition, halves) = LAYOUTS[TYPES[name]], DEFINITIONS[name]
    shape = (ROWS, COLUMNS // layout.length, layout.num_bytes)
    blocks = generator.integers(0, 256, shape, dtype=np.uint8)
    for place in halves:
        blocks[..., place : place + 2] = random_halves(generator, shape[:2])
    if name == "MXFP4":
        blocks[..., 0] = generator.integers(110, 130, shape[:2])
    if name == "IQ1_M":  # four bits of the half above twelve of scales, four times
        half = random_halves(generator, shape[:2]).view(np.uint16)[..., 0]
        for i in range(4):
            upper = (half >> 4 * i & 15) << 4
            blocks[..., 49 + 2 * i] = blocks[..., 49 + 2 * i] & 15 | upper.astype(np.uint8)
    numbers = [[number for block in row for number in definition(block.tobytes())] for row in blocks]
    return blocks.reshape(ROWS, -1), torch.tensor(numbers, dtype=torch.float64)


def random_halves(generator: Any, shape: tuple[int, ...]) -> np.ndarray:
    """As bytes [..., 2], of either sign."""
    numbers = generator.uniform(0.002, 0.02, shape) * generator.choice([-1, 1], shape)
    halves: np.ndarray = numbers.astype(np.float16)[..., None].view(np.uint8)
    return halves


def open_file(path: Path, name: str, stored: np.ndarray) -> GGUFSource:
    tensors = {**embedding_only(), "blk.0.ffn_gate.weight": (stored, Type(TYPES[name]))}
    if name in PLAIN:
        tensors["blk.0.ffn_gate.weight"] = stored.view(PLAIN[name])
    return GGUFSource(write_gguf(path, "llama", llama_metadata(), tensors))


@pytest.mark.parametrize("name", TYPES)
def test_a_tensor_holds_the_numbers_of_its_definition(name: str, tmp_path: Path) -> None:
    stored, expected = random_tensor(name)
    found = open_file(tmp_path / "m.gguf", name, stored).read(NAME)
    assert (found.format, found.shape) == (name, (ROWS, COLUMNS))
    # At most three float32 operations on numbers no larger than the largest
    atol = 3 * 2.0**-24 * 2 * expected.abs().max().item()
    torch.testing.assert_close(found.floats().double(), expected, rtol=0, atol=atol)


@pytest.mark.skipif(library() is None, reason="no kernels for this processor; `make setup` builds them")
@pytest.mark.parametrize("name", TYPES)
def test_a_product_is_that_of_the_numbers_kept_in_their_bits_or_decoded(name: str, tmp_path: Path) -> None:
    stored, weight = random_tensor(name)
    source = open_file(tmp_path / "m.gguf", name, stored)
    x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ weight.T
    # Kept: activations are rounded to 8 bits, and scales of the K types to halves
    for ops, allowed in ((NativeOps(), 0.01), (NativeOps(False), 1e-5)):
        view = Weights(source, ops, torch.device("cpu"), torch.float32) / "model" / "layers" / 0 / "mlp" / "gate_proj"
        multiply = ColumnParallelLinear(view, COLUMNS, ROWS)
        assert (multiply(x) - expected).norm() < allowed * expected.norm()
        if name in DEFINITIONS:
            kept = {name} if allowed == 0.01 and name in KEPT else set()
            assert {one["format"] for one in ops.kept_formats()} == kept


def test_the_document_lists_the_types() -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    (listed,) = re.findall(r"GGUF tensors may have the types ([^.]*)\.", text)
    listed = listed.replace("Q2_K to\nQ6_K", "Q2_K, Q3_K, Q4_K, Q5_K, Q6_K")
    assert set(re.findall(r"\w+_\w+|\w+\d+", listed)) == set(TYPES)


@pytest.mark.parametrize("type_id", [9, 24, 28, 40, 41, 99])
def test_another_type_is_refused_by_name_when_the_file_is_opened(type_id: int, tmp_path: Path) -> None:
    stored, _ = random_tensor("Q8_0")
    path = tmp_path / "m.gguf"
    open_file(path, "Q8_0", stored)
    raw = path.read_bytes()
    entry = b"blk.0.ffn_gate.weight" + (2).to_bytes(4, "little")
    place = raw.index(entry) + len(entry) + 16  # behind two sizes
    assert raw[place] == TYPES["Q8_0"]
    path.write_bytes(raw[:place] + type_id.to_bytes(4, "little") + raw[place + 4 :])
    known = {9: "Q8_1", 24: "I8", 28: "F64", 40: "NVFP4", 41: "Q1_0"}.get(type_id)
    name = f"{known} ({type_id})" if known else str(type_id)
    with pytest.raises(ModelError) as raised:
        GGUFSource(path)
    expected = f"tensor 'blk.0.ffn_gate.weight' has the type {name}; known: BF16, F16, F32, IQ1_M, "
    assert expected in str(raised.value)
