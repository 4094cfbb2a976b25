"""Weights that stay in the bits of their file: GGUF's blocks, and the codes of GPTQ, AWQ and compressed-tensors
(grouped.py), repacked once for the kernels of native/quantised.c.

A format gives codes in groups with a scale, and an offset where it has one; packing lays them out as quantised.h says.
Q4_0, Q4_1 and Q4_K keep 4 bits; formats of 5, 6 and 8 bits are held as bytes. Scales are halves: those of the file, or,
in the K formats, products of two of its numbers rounded to a half (by 2⁻¹² of a scale at most).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch

from ratoon.core.worker import LOOKED_UP
from ratoon.layers import grouped
from ratoon.layers.native import QuantisedWeight, kernel_set_name, library
from ratoon.layers.native.pages import new_weight
from ratoon.layers.native.recording import NO_SUCH_ROW, new_bytes, new_floats
from ratoon.layers.ops import Product
from ratoon.layers.stored import StoredTensor

Tensor = torch.Tensor

BLOCK = 32  # inputs of a column that are packed together, and of a row of activations that share a scale
PANEL = 16  # output columns
SCRATCH_ROOM = 15  # rows that a product keeps room for beside its own: QUANTISED_ROOM of quantised.h
LARGEST_EXPONENT = 14  # of scaled scales: below the largest half, and far above the smallest


class Groups(NamedTuple):
    """A weight [out, in] as codes: scale · (code - zero) + offset. `zero` is 128 for bytes; for 4 bits 8 without
    offsets, 0 with them."""

    codes: (
        Tensor  # [out, in / 32, 16 or 32] bytes; byte i of 16 has code i in its low half, code 16 + i in the high one
    )
    scales: Tensor  # [out, in / group]
    offsets: Tensor | None = None

    @property
    def bits(self) -> int:
        return 4 if self.codes.shape[-1] == BLOCK // 2 else 8

    def floats(self) -> Tensor:
        """[out, in] float32."""
        codes, zero = self.codes, 128
        if self.bits == 4:
            codes, zero = torch.cat((codes & 15, codes >> 4), -1), 8 if self.offsets is None else 0
        numbers = codes.float().sub_(zero).view(len(codes), -1, self.group).mul_(self.scales.float()[..., None])
        if self.offsets is not None:
            numbers += self.offsets.float()[..., None]
        return numbers.flatten(1)

    @property
    def group(self) -> int:
        return self.codes.shape[1] * BLOCK // self.scales.shape[1]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * BLOCK

    def pack_codes(self) -> Tensor:
        """[panels, blocks, bytes / 4, 16, 4]: the same four bytes of 16 columns side by side."""
        quads = _fill_panels(self.codes.contiguous()).view(torch.int32)  # [out, blocks, bytes / 4]
        panels = quads.view(-1, PANEL, *quads.shape[1:])
        return panels.permute(0, 2, 3, 1).contiguous()


class Blocks:
    """A weight as GGUF stores it, whose codes are repacked by a kernel: the file's bytes are read once. It packs to the
    same as the groups that BLOCK_READERS makes of it."""

    def __init__(self, name: str, data: Tensor) -> None:
        """`data`: [out, blocks of a row, bytes of a block]."""
        self._name, self._data = name, data.contiguous()
        self.scales, self.offsets = SCALE_READERS[name](self._data)
        self.bits = 4 if name in FOUR_BITS else 8
        self.in_features = data.shape[1] * BLOCK_SIZES[name]
        self.group = self.in_features // self.scales.shape[1]

    def pack_codes(self) -> Tensor:
        kernels = library()
        assert kernels is not None
        out, row_blocks = self._data.shape[:2]
        packed = new_weight(-(-out // PANEL), self.in_features // BLOCK, self.bits // 2 * BLOCK, dtype=torch.int32)
        number = BLOCK_NAMES.index(self._name)
        kernels.ratoon_repack_codes(number, self._data.data_ptr(), out, row_blocks, packed.data_ptr())
        return packed


class PackedWeight:
    """Groups in the layout of the kernels, and the C structure that points to them."""

    __slots__ = (
        "__weakref__", "_tensors", "bits", "in_features", "multiplier", "num_bytes", "out_features", "pointer",
        "structure",
    )  # fmt: skip

    def __init__(self, groups: Groups | Blocks, bias: Tensor | None) -> None:
        self.out_features, self.in_features, self.bits = len(groups.scales), groups.in_features, groups.bits
        self.multiplier = _multiplier(groups.scales, groups.offsets)
        codes, scales = groups.pack_codes(), self._pack_halves(groups.scales)
        offsets = None if groups.offsets is None else self._pack_halves(groups.offsets)
        bias = None if bias is None else bias.contiguous()
        self._tensors = (codes, scales, offsets, bias)
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors if tensor is not None)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in self._tensors]
        sizes = (self.in_features, self.out_features, groups.bits, groups.group)
        self.structure = QuantisedWeight(*pointers, *sizes, self.multiplier)
        self.pointer = ctypes.addressof(self.structure)

    def _pack_halves(self, numbers: Tensor) -> Tensor:
        """[out, groups] → [panels, groups, 16] halves, divided by the multiplier."""
        if self.multiplier != 1.0:
            numbers = numbers / self.multiplier
        halves, kernels = numbers.half(), library()
        assert kernels is not None
        rows, groups = halves.shape
        if halves.stride(0) != groups * halves.stride(1):
            halves = halves.contiguous()
        packed = new_weight(-(-rows // PANEL), groups, PANEL, dtype=torch.float16)
        stride = halves.stride(1) * halves.itemsize
        kernels.ratoon_repack_halves(halves.data_ptr(), rows, groups, stride, packed.data_ptr())
        return packed


class QuantisedLinear:
    """[T, in] → [T, out] with a packed weight and activations in 8 bits."""

    __slots__ = ("_kernels", "_scratch_bytes", "weight")

    def __init__(self, weight: PackedWeight) -> None:
        kernels = library()
        assert kernels is not None
        self.weight = weight
        self._scratch_bytes = kernels.ratoon_quantised_scratch(weight.in_features)
        self._kernels = kernels

    @property
    def out_features(self) -> int:
        return self.weight.out_features

    def __call__(self, x: Tensor) -> Tensor:
        y = new_floats(x.shape[0], self.weight.out_features)
        self.write(x, y)
        return y

    def write(self, x: Tensor, y: Tensor) -> None:
        """Writes the product to y [T, out], which may be some columns of a larger tensor."""
        rows = x.shape[0]
        scratch = new_bytes((rows + SCRATCH_ROOM) * self._scratch_bytes)
        self._kernels.ratoon_quantised_linear(
            self.weight.pointer, x.data_ptr(), x.stride(0), rows, scratch.data_ptr(), y.data_ptr(), y.stride(0)
        )


class QuantisedGatedMLP:
    """[T, H] → [T, H]: two products and the activation between them, in one call."""

    __slots__ = ("_down", "_gate_up", "_kernels", "_scratch_bytes")

    def __init__(self, gate_up: QuantisedLinear, down: QuantisedLinear) -> None:
        kernels = library()
        assert kernels is not None
        self._gate_up, self._down = gate_up.weight, down.weight
        assert self._gate_up.out_features == 2 * self._down.in_features
        widest = max(self._gate_up.in_features, self._down.in_features)
        self._scratch_bytes = kernels.ratoon_quantised_scratch(widest)
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        gate_up, down, rows = self._gate_up, self._down, x.shape[0]
        between = new_floats(rows, 3 * down.in_features)  # gate and up side by side, then the input of down
        scratch = new_bytes((rows + SCRATCH_ROOM) * self._scratch_bytes)
        y = new_floats(rows, down.out_features)
        self._kernels.ratoon_quantised_gated_mlp(
            gate_up.pointer, down.pointer, x.data_ptr(), x.stride(0), rows, scratch.data_ptr(), between.data_ptr(),
            y.data_ptr(),
        )  # fmt: skip
        return y


class KeptTable:
    """[T] → [T, size]: rows of a table, decoded when they are asked for."""

    __slots__ = ("_arguments", "_data", "_kernels", "_place", "_size")

    def __init__(self, name: str, data: Tensor, size: int) -> None:
        """`data` [V, …] is in one of TABLE_FORMATS, each row dense; `size`: numbers of a row."""
        kernels = library()
        assert kernels is not None
        self._kernels, self._data, self._size = kernels, data, size
        number, row_bytes = TABLE_FORMATS.index(name), data.stride(0) * data.itemsize
        self._arguments = (number, data.data_ptr(), row_bytes, len(data))
        self._place: tuple[int, int] | None = None

    def as_part(self, first: int, total: int) -> KeptTable:
        """Returns this table as the rows from `first` on of a table that has `total`, whose other rows are zeros."""
        part = copy(self)
        part._place = (first, total)
        return part

    def __call__(self, ids: Tensor) -> Tensor:
        ids = ids.contiguous()
        y = new_floats(len(ids), self._size)
        asked = (ids.data_ptr(), len(ids), self._size, y.data_ptr())
        if self._place is None:
            failed = self._kernels.ratoon_embed(*self._arguments, *asked)
        else:
            failed = self._kernels.ratoon_embed_part(*self._arguments, *self._place, *asked)
        if failed:
            raise IndexError(NO_SUCH_ROW)
        return y


Packed = Callable[[PackedWeight], None]  # is told of each new weight


class KeptFormat:
    """A format that is kept in its own bits, and what is kept of it."""

    def __init__(
        self,
        name: str,
        read: Callable[[Sequence[StoredTensor]], Groups | Blocks],
        packed: Packed | None = None,
    ) -> None:
        self.name = name
        self._read = read  # parts, one above the other
        self._packed = packed
        self.num_weights = 0
        self.num_bytes = 0
        self.bits = 0  # of a packed code
        self._tables: list[StoredTensor] = []  # without those that a product has, too

    def make_linear(self, parts: Sequence[StoredTensor], bias: Tensor | None) -> Product:
        """Parts whose inputs are in different orders are products of their own."""
        order = parts[0].extras.get("order")
        if any(not _same_order(order, part.extras.get("order")) for part in parts[1:]):
            biases = [None] * len(parts) if bias is None else bias.split([part.shape[0] for part in parts])
            products = [self.make_linear([part], own) for part, own in zip(parts, biases, strict=True)]
            return lambda x: torch.cat([multiply(x) for multiply in products], dim=-1)
        self._tables = [table for table in self._tables if table is not parts[0]]  # counted once
        multiply = QuantisedLinear(self._pack(parts, bias))
        return multiply if order is None else lambda x: multiply(torch.index_select(x, 1, order))

    def _pack(self, parts: Sequence[StoredTensor], bias: Tensor | None) -> PackedWeight:
        packed = PackedWeight(self._read(parts), bias)
        if self._packed is not None:
            self._packed(packed)
        self.num_weights += packed.out_features * packed.in_features
        self.num_bytes += packed.num_bytes
        self.bits = packed.bits
        return packed

    def make_embedding(self, table: StoredTensor) -> Callable[[Tensor], Tensor]:
        """Rows are decoded from the file's blocks when they are asked for."""
        self._tables.append(table)
        if self.name in TABLE_FORMATS and table.data[0].is_contiguous():
            return KeptTable(self.name, table.data, table.shape[1])
        blocks, decode, size = table.data, table.decode, table.shape[1]
        assert decode is not None

        def lookup(ids: Tensor) -> Tensor:
            return decode(torch.index_select(blocks, 0, ids)).view(-1, size)

        return lookup

    def facts(self) -> list[dict[str, Any]]:
        """Lists what products multiply by, then what is only looked up."""
        tables = self._tables
        figures = [
            (self.num_weights, self.num_bytes, f"{self.bits}-bit weights, 8-bit activations ({kernel_set_name()})"),
            (
                sum(math.prod(one.shape) for one in tables),
                sum(sum(data.nbytes for data in (one.data, *one.extras.values())) for one in tables),
                LOOKED_UP,
            ),
        ]
        return [
            {"format": self.name, "num_weights": num_weights, "num_bytes": num_bytes, "product": product}
            for num_weights, num_bytes, product in figures
            if num_weights
        ]


class KeptFormats:
    """The formats of one model's weights."""

    def __init__(self, packed: Packed | None = None) -> None:
        self.by_name = {name: KeptFormat(name, partial(_read_blocks, name), packed) for name in BLOCK_NAMES}
        self.by_name |= {name: KeptFormat(name, _read_codes, packed) for name in grouped.FORMATS.values()}

    def find(self, stored: StoredTensor) -> KeptFormat | None:
        """The format that keeps this weight as it is stored. None: there is none, or its shape does not allow it."""
        return None if self._obstacle(stored) else self.by_name.get(stored.format)

    def note_on(self, stored: StoredTensor) -> str | None:
        """Says why a quantised weight is decoded, or that its scales are unusable."""
        obstacle = self._obstacle(stored)
        if obstacle is not None:
            return f"decoded to floats, since {obstacle}"
        if not _scales_are_finite(stored):
            return "scales are NaN or infinite, and answers will fail"
        return None

    def _obstacle(self, stored: StoredTensor) -> str | None:
        if stored.decode is None or stored.format not in self.by_name:
            return f"there are no products with {stored.format}"
        if stored.transposed:
            return "the file has the weight transposed"
        if len(stored.shape) != 2 or stored.shape[1] % BLOCK:
            return f"{BLOCK} does not divide the inputs"
        if "scales" in stored.extras and stored.shape[1] // stored.extras["scales"].shape[1] % BLOCK:
            return f"groups are no multiples of {BLOCK} inputs"
        return None

    def facts(self) -> list[dict[str, Any]]:
        """Lists, for display, what is kept, and how it is multiplied."""
        return [fact for one in self.by_name.values() for fact in one.facts()]


def _fill_panels(rows: Tensor) -> Tensor:
    """Adds rows of zeros behind the last, up to a whole panel."""
    missing = -len(rows) % PANEL
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


def _multiplier(scales: Tensor, offsets: Tensor | None) -> float:
    """A power of two that all scales are divided by before they are rounded to halves, so that none is too large or
    too small for one. 1 for scales that are halves already."""
    if scales.dtype == torch.float16:
        return 1.0
    largest = float(scales.abs().max()) if scales.numel() else 0.0
    if offsets is not None and offsets.numel():
        largest = max(largest, float(offsets.abs().max()))
    if not (0 < largest < math.inf):
        return 1.0
    return 2.0 ** (math.frexp(largest)[1] - LARGEST_EXPONENT)


def _read_blocks(name: str, parts: Sequence[StoredTensor]) -> Blocks:
    return Blocks(name, parts[0].data if len(parts) == 1 else torch.cat([part.data for part in parts]))


def _read_codes(parts: Sequence[StoredTensor]) -> Groups:
    """Reads the codes of grouped tensors, one above the other. A zero point that is not in the middle becomes an
    offset."""
    codes = torch.cat([part.data for part in parts])
    per_block = [part.shape[1] // BLOCK // part.extras["scales"].shape[1] for part in parts]
    scales, zeros = (
        torch.cat([part.extras[name].repeat_interleave(n, dim=1) for part, n in zip(parts, per_block, strict=True)])
        for name in ("scales", "zeros")
    )
    scales = scales if scales.dtype == torch.float16 else scales.float()
    is_bytes = codes.shape[-1] == BLOCK
    if (zeros == (128 if is_bytes else 8)).all():
        return Groups(codes, scales)
    return Groups(codes, scales.float(), ((128 if is_bytes else 0) - zeros) * scales.float())


def _scales_are_finite(stored: StoredTensor) -> bool:
    if stored.extras:
        return all(bool(stored.extras[name].isfinite().all()) for name in ("scales", "zeros"))
    first, last = SCALE_BYTES[stored.format]
    return bool(_halves(stored.data[..., first:last]).isfinite().all())


def _same_order(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _read_q4_0(blocks: Tensor) -> Groups:
    return Groups(blocks[..., 2:], *_one_half(blocks))


def _read_q4_1(blocks: Tensor) -> Groups:
    return Groups(blocks[..., 4:], *_two_halves(blocks))


def _read_q8_0(blocks: Tensor) -> Groups:
    return Groups(blocks[..., 2:] ^ 128, *_one_half(blocks))


def _read_q5_0(blocks: Tensor) -> Groups:
    """Codes from -16 to 15."""
    return Groups(_five_bits(blocks[..., 2:]) + (128 - 16), *_one_half(blocks))


def _read_q5_1(blocks: Tensor) -> Groups:
    return Groups(_five_bits(blocks[..., 4:]) + 128, *_two_halves(blocks))


def _five_bits(data: Tensor) -> Tensor:
    """[…, 4 bytes of high bits, 16 bytes of low halves] → 32 codes from 0 to 31."""
    shifts = torch.arange(8, dtype=torch.uint8)
    high = (data[..., :4, None] >> shifts & 1).flatten(-2)  # bit i of the 32 is that of code i
    low = torch.cat((data[..., 4:] & 15, data[..., 4:] >> 4), -1)
    return low | high << 4


def _read_q4_k(blocks: Tensor) -> Groups:
    scales, offsets = _small_scales(blocks)
    pairs = blocks[..., 16:].unflatten(-1, (4, 32))  # two groups of 32: in the low halves, in the high ones
    low, high = pairs & 15, pairs >> 4
    groups = torch.stack((low, high), -2)  # [rows, blocks, 4, 2, 32]
    codes = groups[..., :16] | groups[..., 16:] << 4
    return Groups(codes.flatten(1, 3), scales, offsets)


def _read_q5_k(blocks: Tensor) -> Groups:
    scales, offsets = _small_scales(blocks)
    pairs = blocks[..., 48:].unflatten(-1, (4, 32))
    low = torch.stack((pairs & 15, pairs >> 4), -2).flatten(-3, -2)  # [rows, blocks, 8, 32]
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    high = blocks[..., None, 16:48] >> shifts & 1  # bit g of byte i belongs to code i of group g
    return Groups(((low | high << 4) + 128).flatten(1, 2), scales, offsets)


def _read_q6_k(blocks: Tensor) -> Groups:
    """Codes from -32 to 31, in groups of 16."""
    low = blocks[..., :128].unflatten(-1, (2, 1, 64))
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    low = torch.cat((low & 15, low >> 4), -2).flatten(-2).unflatten(-1, (4, 32))
    high = torch.cat([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], -2)
    codes = ((low | high) + (128 - 32)).flatten(1, 3)  # [rows, blocks · 8, 32]
    return Groups(codes, *_scales_of_16(blocks))


def _one_half(blocks: Tensor) -> tuple[Tensor, None]:
    """A block's scale, where it lies."""
    return blocks[..., :2].view(torch.float16)[..., 0], None


def _two_halves(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scales, offsets = blocks[..., :4].view(torch.float16).unbind(-1)
    return scales, offsets


def _scales_of_16(blocks: Tensor) -> tuple[Tensor, None]:
    """Reads the scales of Q6_K: 16 bytes, times a half."""
    scales = blocks[..., 192:208].view(torch.int8) * _halves(blocks[..., 208:210]).float()
    return scales.flatten(1), None


def _small_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of the 8 groups of Q4_K and Q5_K: 6 bits each in 12 bytes, times a half each."""
    whole = _halves(blocks[..., :4]).float()
    first, second, high = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((first & 63, (high & 15) | (first >> 6 << 4)), -1) * whole[..., 0:1]
    minima = torch.cat((second & 63, (high >> 4) | (second >> 6 << 4)), -1) * whole[..., 1:2]
    return scales.flatten(1), -minima.flatten(1)


def _halves(columns: Tensor) -> Tensor:
    return columns.contiguous().view(torch.float16)


# [rows, blocks of a row, bytes of a block] → groups
BLOCK_READERS: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q5_0": _read_q5_0,
    "Q5_1": _read_q5_1,
    "Q8_0": _read_q8_0,
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q5_k,
    "Q6_K": _read_q6_k,
}
BLOCK_NAMES = tuple(BLOCK_READERS)  # repack.c numbers the formats in this order
TABLE_FORMATS = (*BLOCK_NAMES, "F32", "F16", "BF16")  # embed.c's numbers
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
BLOCK_SIZES = {name: 256 if name.endswith("K") else BLOCK for name in BLOCK_NAMES}  # inputs
# The same → scales and offsets, [rows, groups of a row]
SCALE_READERS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor | None]]] = {
    "Q4_0": _one_half, "Q4_1": _two_halves, "Q5_0": _one_half, "Q5_1": _two_halves, "Q8_0": _one_half,
    "Q4_K": _small_scales, "Q5_K": _small_scales, "Q6_K": _scales_of_16,
}  # fmt: skip
# Where a block has its halves: scales and offsets, or what they are multiplied with
SCALE_BYTES = {
    "Q4_0": (0, 2), "Q4_1": (0, 4), "Q5_0": (0, 2), "Q5_1": (0, 4), "Q8_0": (0, 2), "Q4_K": (0, 4), "Q5_K": (0, 4),
    "Q6_K": (208, 210),
}  # fmt: skip
