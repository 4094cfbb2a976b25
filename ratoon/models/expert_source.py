"""Checkpoints that keep the experts of a layer as one tensor, as a TensorSource that has each expert apart.

Layers take the weights of an expert by its number, whatever the file has: `experts.3.gate_proj.weight`. Fused tensors
are [experts, out, in], of one projection or of gate and up together. gpt-oss has them transposed, with gate and up in
turns; its GGUF files do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.models.mxfp4_source import cut_codes, decode_gguf_blocks

if TYPE_CHECKING:
    from ratoon.core.config import ModelConfig
    from ratoon.layers.weights import Destination, TensorSource

MXFP4 = "MXFP4"  # GGUF's name of the format
FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(_bias|\.weight|\.bias)?")
# Granite's files: gate and up together, and down, with these names instead
NAMED = re.compile(r"(.*\.block_sparse_moe)\.(input_linear|output_linear)(\.weight)")
PROJECTIONS = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}


class ExpertPiece(NamedTuple):
    """One expert's part of a fused tensor."""

    tensor: str
    expert: int
    rows: slice  # of the expert's weight, transposed if the file has it so, or of its bias
    transposed: bool
    shape: tuple[int, ...]


class ExpertSource:
    """Implements TensorSource over another one."""

    def __init__(self, source: TensorSource, interleaved: bool = False) -> None:
        """`interleaved`: weights are [experts, in, out], and gate and up take turns, as in gpt-oss."""
        self._source = source
        self.name = source.name
        self._pieces: dict[str, ExpertPiece] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in source.shapes().items():
            match = FUSED.fullmatch(name) or NAMED.fullmatch(name)
            is_bias = match is not None and match[3] in ("_bias", ".bias")
            if match is None or len(shape) != (2 if is_bias else 3):
                self._shapes[name] = tuple(shape)
                continue
            in_turns = interleaved and match[3] in (None, "_bias")  # GGUF's names have a suffix
            prefix = match[1] if match.re is FUSED else f"{match[1]}.experts"
            self._split(name, prefix, PROJECTIONS.get(match[2], match[2]), tuple(shape), is_bias, in_turns)
        self._shapes |= {name: piece.shape for name, piece in self._pieces.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, part: TensorSlice | None = None, destination: Destination | None = None) -> StoredTensor:
        piece = self._pieces.get(name)
        if piece is None:
            return self._source.read(name, part, destination)
        taken = TensorSlice(0, piece.expert, piece.expert + 1)
        stored = _one_expert(self._source.read(piece.tensor, taken, destination), piece)
        if stored.format == MXFP4 and stored.decode is not None:
            return cut_codes(decode_gguf_blocks(stored.data), part)
        return _cut(stored, part)

    def _split(
        self, name: str, prefix: str, projection: str, shape: tuple[int, ...], is_bias: bool, interleaved: bool
    ) -> None:
        transposed = interleaved and not is_bias
        size = shape[2] if transposed else shape[1]
        inputs = shape[1] if transposed else shape[-1]
        parts = {projection: slice(0, size)}
        if projection == "gate_up_proj":
            half = size // 2
            parts = {"gate_proj": slice(0, half), "up_proj": slice(half, size)}
            if interleaved:
                parts = {"gate_proj": slice(0, size, 2), "up_proj": slice(1, size, 2)}
        for part, rows in parts.items():
            count = len(range(*rows.indices(size)))
            own = (count,) if is_bias else (count, inputs)
            for expert in range(shape[0]):
                full = f"{prefix}.{expert}.{part}.{'bias' if is_bias else 'weight'}"
                self._pieces[full] = ExpertPiece(name, expert, rows, transposed, own)


def with_experts_apart(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The source itself, unless it has the experts of layers fused."""
    if config.experts is None or not any(FUSED.fullmatch(name) or NAMED.fullmatch(name) for name in source.shapes()):
        return source
    return ExpertSource(source, interleaved=config.architecture == "GptOssForCausalLM")


def _one_expert(stored: StoredTensor, piece: ExpertPiece) -> StoredTensor:
    """[1, …] → the piece."""
    data = stored.data[0]
    if stored.decode is None:
        data = data.t() if piece.transposed else data
        return replace(stored, shape=piece.shape, data=data[piece.rows])
    assert not piece.transposed, "encoded weights are kept as [out, in]"
    extras = {name: part[0][piece.rows] for name, part in stored.extras.items()}
    return replace(stored, shape=piece.shape, data=data[piece.rows], extras=extras)


def _cut(stored: StoredTensor, part: TensorSlice | None) -> StoredTensor:
    """A part of a weight. Encoded inputs are cut where blocks end; elsewhere the weight is decoded."""
    if part is None:
        return stored
    if stored.decode is None:
        return replace(stored, shape=part.shape(stored.shape), data=stored.data[part.slices()])
    if part.dim == 0:
        return replace(stored, shape=part.shape(stored.shape), data=stored.data[part.slices()])
    length = stored.shape[1] // stored.data.shape[1]  # numbers in a block
    if part.start % length or part.stop % length:
        return StoredTensor.of_floats(stored.floats(), part)
    blocks = stored.data[:, part.start // length : part.stop // length]
    return replace(stored, shape=part.shape(stored.shape), data=blocks)
