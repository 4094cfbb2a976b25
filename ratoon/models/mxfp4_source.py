"""The experts of gpt-oss in MXFP4, as a TensorSource that has each expert apart.

A file has `gate_up_proj_blocks` [experts, out, in / 32, 16] of bytes, two numbers of 4 bits in each, and
`gate_up_proj_scales` [experts, out, in / 32], powers of two. Every number is a whole number of halves times its scale:
it is kept as a byte with the scale, without loss, for the products of grouped codes (layers/grouped.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ratoon.core.errors import ModelError
from ratoon.layers.stored import StoredTensor, TensorSlice

if TYPE_CHECKING:
    import torch

    from ratoon.layers.weights import Destination, TensorSource

METHOD = "mxfp4"
BLOCK = 32
HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the sizes of numbers; the fourth bit is the sign
SCALE_BIAS = 127
ZERO = 128  # of codes
PACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)_blocks")


class Mxfp4Source:
    """Implements TensorSource over the files' own."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.name = source.name
        self._shapes: dict[str, tuple[int, ...]] = {}
        # The fused name, the expert, and which of its rows: 0 those of the gate, 1 those of up, None all
        self._pieces: dict[str, tuple[str, int, int | None]] = {}
        shapes = source.shapes()
        for name, shape in shapes.items():
            match = PACKED.fullmatch(name)
            if match is not None:
                self._split(match[1], match[2], tuple(shape), tuple(shapes.get(_scales_of(name), ())))
            elif not name.endswith("_scales") or name.removesuffix("_scales") + "_blocks" not in shapes:
                self._shapes[name] = tuple(shape)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, part: TensorSlice | None = None, destination: Destination | None = None) -> StoredTensor:
        if name not in self._pieces:
            return self._source.read(name, part, destination)
        tensor, expert, half = self._pieces[name]
        one = TensorSlice(0, expert, expert + 1)
        blocks, scales = (self._source.read(each, one).data[0] for each in (f"{tensor}_blocks", f"{tensor}_scales"))
        rows = slice(None) if half is None else slice(half, None, 2)  # gate and up take turns
        return cut_codes(decode_codes(blocks[rows], scales[rows]), part)

    def _split(self, prefix: str, projection: str, shape: tuple[int, ...], scales: tuple[int, ...]) -> None:
        if len(shape) != 4 or shape[3] != BLOCK // 2 or scales != shape[:3]:
            problem = f"tensors of {prefix}.{projection} have the shapes {shape} and {scales}"
            raise ModelError(self.name, problem, "blocks [experts, out, in / 32, 16] and a scale for each")
        parts = {projection: None} if projection == "down_proj" else {"gate_proj": 0, "up_proj": 1}
        for part, half in parts.items():
            rows = shape[1] if half is None else shape[1] // 2
            for expert in range(shape[0]):
                name = f"{prefix}.{expert}.{part}.weight"
                self._pieces[name] = f"{prefix}.{projection}", expert, half
                self._shapes[name] = (rows, shape[2] * BLOCK)


def decode_codes(blocks: torch.Tensor, scales: torch.Tensor) -> StoredTensor:
    """blocks [out, in / 32, 16] and scales [out, in / 32] of bytes → the weight as codes in groups."""
    import torch

    from ratoon.layers.grouped import grouped_tensor

    sizes = torch.tensor(HALVES, dtype=torch.int16)
    table = (torch.cat((sizes, -sizes)) + ZERO).to(torch.uint8)
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1).long()  # the low half of a byte is the first
    factors = torch.ldexp(torch.ones(scales.shape), scales.int() - SCALE_BIAS - 1)  # codes count halves
    return grouped_tensor(table[numbers], factors, torch.full_like(factors, ZERO), 8)


def _scales_of(name: str) -> str:
    return name.removesuffix("_blocks") + "_scales"


def decode_gguf_blocks(blocks: torch.Tensor) -> StoredTensor:
    """Decodes GGUF's blocks [out, in / 32, 17]: a scale, then 16 bytes whose low halves are the first 16 numbers."""
    import torch

    scales, packed = blocks[..., 0], blocks[..., 1:]
    numbers = torch.cat((packed & 15, packed >> 4), -1)  # in their order
    return decode_codes(numbers[..., 0::2] | numbers[..., 1::2] << 4, scales)


def cut_codes(stored: StoredTensor, part: TensorSlice | None) -> StoredTensor:
    from ratoon.layers.grouped import take_inputs, take_rows

    if part is None:
        return stored
    if part.dim == 0:
        return take_rows(stored, part.start, part.stop)
    return take_inputs(stored, part.start, part.stop) or StoredTensor.of_floats(stored.floats(), part)
