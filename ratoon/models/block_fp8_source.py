"""Checkpoints in 8-bit floats with a scale for each block of a weight, as DeepSeek publishes its models, as a
TensorSource: in place of a weight and its scales one tensor, in the form of layers/fp8.py. Other tensors are passed on.

A weight [out, in] is float8_e4m3fn, and beside it `weight_scale_inv` [ceil(out / block), ceil(in / block)] has what the
numbers of each block are multiplied with; the last blocks of a row and of a column may be cut off. All of it is checked
when the files are opened, before a tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ratoon.core.errors import ModelError
from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.models.config_fields import ConfigFields
from ratoon.models.damage import shorten, show
from ratoon.models.safetensors_source import SafetensorsSource

if TYPE_CHECKING:
    from ratoon.layers.weights import Destination, TensorSource

METHOD = "fp8"
SCALES = "_scale_inv"  # behind the name of a weight
NUMBERS = "F8_E4M3"  # safetensors' name of what a weight is stored as
SCALE_FORMATS = ("F32", "BF16", "F16")
EXPECTED = (
    "fmt e4m3, activation_scheme dynamic, and weight_block_size with two numbers of rows and columns, [128, 128] for "
    "example; or the original safetensors"
)


class Block(NamedTuple):
    """The numbers of a weight that share a scale."""

    rows: int
    columns: int


def read_block(fields: ConfigFields) -> Block:
    """Reads the size of blocks from the fields of `quantization_config`. Raises ModelError for other forms of fp8."""
    kind = fields.text("fmt", "e4m3")
    scheme = fields.text("activation_scheme", "dynamic")
    size = fields.raw.get("weight_block_size")
    sides = [side for side in size if type(side) is int and side > 0] if isinstance(size, list | tuple) else []
    if kind == "e4m3" and scheme == "dynamic" and len(sides) == len(size or ()) == 2:
        return Block(*sides)
    found = f"fmt {shorten(kind)}, activation_scheme {shorten(scheme)}, weight_block_size {show(size)}"
    raise ModelError(fields.source, f"is quantised with fp8, {found}", EXPECTED)


class BlockFp8Source:
    """Implements TensorSource over the files' own."""

    def __init__(self, source: TensorSource, block: Block) -> None:
        self.name = source.name
        self._source = source
        self._block = block
        self._formats: Mapping[str, str] = source.formats() if isinstance(source, SafetensorsSource) else {}
        shapes = source.shapes()
        self._scaled = {name.removesuffix(SCALES) for name in shapes if name.endswith(f".weight{SCALES}")}
        self._check(shapes)
        hidden = {name + SCALES for name in self._scaled}
        self._shapes = {name: shape for name, shape in shapes.items() if name not in hidden}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, part: TensorSlice | None = None, destination: Destination | None = None) -> StoredTensor:
        """The numbers of a part are read alone. At a destination, both are there before they are decoded."""
        if name not in self._scaled:
            return self._source.read(name, part, destination)
        from ratoon.layers import fp8

        numbers, scales = self._source.read(name, part).data, self._source.read(name + SCALES).data.float()
        if numbers.dtype != fp8.DTYPE:
            raise ModelError(self.name, f"tensor {name!r} with scales is stored as {numbers.dtype}", NUMBERS)
        first = (0, 0)
        if part is not None:
            side = self._block[part.dim]
            scales = scales.narrow(part.dim, part.start // side, -(-part.stop // side) - part.start // side)
            first = (part.start % side, 0) if part.dim == 0 else (0, part.start % side)
        if destination is not None:
            numbers, scales = numbers.to(destination.device), scales.to(destination.device)
        return fp8.stored_blocks(numbers, scales.contiguous(), self._block, first)

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ModelError, by the name of a tensor: scales that are missing, left over, or of another shape."""
        for name in shapes:
            if self._formats.get(name) == NUMBERS and name not in self._scaled:
                raise ModelError(self.name, f"lacks {name + SCALES!r}, the scales of {name!r}", "one for each block")
        for name in sorted(self._scaled):
            scales = name + SCALES
            if name not in shapes:
                raise ModelError(self.name, f"holds {scales!r} without {name!r}", "both, or neither of them")
            if (kind := self._formats.get(name, NUMBERS)) != NUMBERS:
                problem = f"holds {scales!r}, and {name!r} is stored as {kind}"
                raise ModelError(self.name, problem, f"no scales, or a weight in {NUMBERS}")
            if (kind := self._formats.get(scales, SCALE_FORMATS[0])) not in SCALE_FORMATS:
                raise ModelError(self.name, f"{scales!r} is stored as {kind}", f"one of {', '.join(SCALE_FORMATS)}")
            if len(shapes[name]) != 2:
                raise ModelError(self.name, f"{name!r} with scales has shape {shapes[name]}", "two dimensions")
            expected = tuple(-(-size // side) for size, side in zip(shapes[name], self._block, strict=True))
            if shapes[scales] != expected:
                problem = f"{scales!r} has shape {shapes[scales]}"
                block = f"{self._block.rows} x {self._block.columns}"
                raise ModelError(self.name, problem, f"{expected}, one for each {block} of {shapes[name]}")
