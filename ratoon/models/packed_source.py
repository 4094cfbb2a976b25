"""Checkpoints of GPTQ, AWQ and compressed-tensors as a TensorSource: in place of the parts of a linear layer (codes,
scales, zero points) one tensor `weight`, in the form of layers/grouped.py. Other tensors are passed on.

What a checkpoint holds is in `quantization_config` of its config.json. Codes have 4 or 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ratoon.core.errors import ModelError
from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.models.config_fields import ConfigFields
from ratoon.models.damage import shorten

if TYPE_CHECKING:
    import torch

    from ratoon.layers.weights import Destination, TensorSource

GPTQ, AWQ, COMPRESSED = "gptq", "awq", "compressed-tensors"
BITS = (4, 8)
# What compressed-tensors' formats hold: pairs of type and bits. Codes of `pack-quantized` are packed into words, the
# others' are bytes.
COMPRESSED_FORMATS = {
    "pack-quantized": (("int", 4), ("int", 8)),
    "int-quantized": (("int", 4), ("int", 8)),
    "naive-quantized": (("int", 4), ("int", 8), ("float", 8)),
    "float-quantized": (("float", 8),),
}
STRATEGIES = {"int": ("tensor", "channel", "group"), "float": ("tensor", "channel")}  # by type
COMPRESSED_EXPECTED = (
    "pack-quantized, int-quantized or naive-quantized with int of 4 or 8 bits for each tensor, channel or group, or "
    "float-quantized or naive-quantized with float of 8 bits for each tensor or channel; or the original safetensors"
)
OTHERWISE = "the original safetensors, a GGUF file, fp8 in blocks, or GPTQ, AWQ or compressed-tensors with 4 or 8 bits"
# The parts of a layer beside its codes; those that only quantise activations or caches are not read.
PARTS = {
    GPTQ: ("qzeros", "scales", "g_idx"),
    AWQ: ("qzeros", "scales"),
    COMPRESSED: (
        "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale", "input_zero_point",
        "output_scale", "output_zero_point", "k_scale", "v_scale",
    ),
}  # fmt: skip
CODES = {GPTQ: "qweight", AWQ: "qweight", COMPRESSED: "weight_packed"}
# The dimension of a layer's tensors that has its outputs, and the one that has its inputs: in words, in groups, or one
# by one, as their sizes say.
AXES = {
    GPTQ: {"qweight": (1, 0), "qzeros": (1, 0), "scales": (1, 0), "g_idx": (0, 0)},
    AWQ: {"qweight": (1, 0), "qzeros": (1, 0), "scales": (1, 0)},
    COMPRESSED: {
        "weight": (0, 1), "weight_packed": (0, 1), "weight_scale": (0, 1), "weight_zero_point": (0, 1),
        "weight_g_idx": (0, 0),
    },
}  # fmt: skip
ORDERS = ("g_idx", "weight_g_idx")  # the group of each input
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of 8, of each four bits of a word


class Scheme(NamedTuple):
    """How the linear layers of a checkpoint are stored."""

    method: str
    bits: int
    zeros_less_one: bool = False  # GPTQ's first format stores zero points less one
    is_float: bool = False  # 8-bit floats, of compressed-tensors
    needs_zeros: bool = False  # of compressed-tensors, where a layer may lack zero points if it is symmetric


def read_scheme(fields: ConfigFields) -> Scheme:
    """`fields`: those of `quantization_config`."""
    source = fields.source
    method = fields.text("quant_method", "an unknown method")
    if method == COMPRESSED:
        return _read_compressed_scheme(fields, source)
    if method not in (GPTQ, AWQ):
        raise ModelError(source, f"is quantised with {shorten(method)}", OTHERWISE)
    bits = fields.count("bits", 4)
    version = fields.text("version", "gemm").lower()
    if bits not in BITS or (method == AWQ and (bits != 4 or version != "gemm")):
        raise ModelError(source, f"is quantised with {method}, {bits} bits, version {shorten(version)}", OTHERWISE)
    if method == AWQ:
        backend = fields.text("backend", "autoawq")
        if backend != "autoawq":
            raise ModelError(source, f"is quantised with awq, backend {shorten(backend)}", "backend autoawq")
        return Scheme(method, bits)
    layout = "marlin" if fields.raw.get("is_marlin_format") else fields.text("checkpoint_format", GPTQ)
    if layout not in (GPTQ, "gptq_v2"):
        problem = f"is quantised with gptq, checkpoint_format {shorten(layout)}"
        raise ModelError(source, problem, "checkpoint_format gptq or gptq_v2")
    for name, changed in _mapping(fields.raw.get("dynamic")).items():
        if _mapping(changed).get("bits", bits) != bits:
            problem = f"is quantised with gptq, {bits} bits, and {changed['bits']} for {shorten(name)}"
            raise ModelError(source, problem, "the same bits for all layers")
    return Scheme(method, bits, zeros_less_one=layout == GPTQ)


def _read_compressed_scheme(fields: ConfigFields, source: str) -> Scheme:
    """Reads the scheme of compressed-tensors, which must be the same for all groups of layers."""
    stored = fields.text("format", "pack-quantized")
    found: dict[tuple[str, Any], None] = {}  # type and bits
    others: list[str] = []  # what is not supported
    symmetric = []
    for group in _mapping(fields.raw.get("config_groups")).values():
        weights = _mapping(_mapping(group).get("weights"))
        if not weights:
            continue
        kind, bits = str(weights.get("type") or "int"), weights.get("num_bits")
        found[kind, bits if isinstance(bits, int) else shorten(str(bits))] = None
        symmetric.append(weights.get("symmetric", True) is not False)
        strategy = weights.get("strategy") or "channel"
        if kind in STRATEGIES and strategy not in STRATEGIES[kind]:
            others.append(f"a scale for each {shorten(str(strategy))} of {kind}")
        own_format = _mapping(group).get("format") or stored
        if own_format != stored:
            others.append(f"a group in {shorten(str(own_format))}")
    for name in ("sparsity_config", "transform_config"):
        config = _mapping(fields.raw.get(name))
        if config.get("config_groups") or config.get("format", "dense") != "dense":
            others.append(name)
    if stored in COMPRESSED_FORMATS and len(found) == 1 and not others:
        ((kind, bits),) = found
        if (kind, bits) in COMPRESSED_FORMATS[stored]:
            return Scheme(COMPRESSED, bits, is_float=kind == "float", needs_zeros=not any(symmetric))
    numbers = " and ".join(sorted(f"{kind} of {bits}" for kind, bits in found)) or "an unknown number of"
    shown = ", ".join([COMPRESSED, shorten(stored), f"{numbers} bits", *others])
    raise ModelError(source, f"is quantised with {shown}", COMPRESSED_EXPECTED)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


class PackedSource:
    """Implements TensorSource."""

    def __init__(self, source: TensorSource, scheme: Scheme) -> None:
        self.name = source.name
        self._source = source
        self._scheme = scheme
        self._layers = _find_layers(source.shapes(), scheme)
        self._shapes = self._find_shapes()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, part: TensorSlice | None = None, destination: Destination | None = None) -> StoredTensor:
        layer = name.removesuffix("weight")
        if layer not in self._layers or layer == name:
            return self._source.read(name, part, destination)
        if part is not None:
            shape = self._shapes[name]
            cuts = self._cut_parts(layer, shape, part)
            if cuts is not None:
                return self._read_layer(layer, part.shape(shape), cuts)
        return _take_part(self._read_layer(layer, self._shapes[name]), part)

    def _cut_parts(self, layer: str, shape: tuple[int, ...], part: TensorSlice) -> dict[str, TensorSlice | None] | None:
        """Says which part of each of a layer's tensors makes up a part of its weight; what is not in it is not needed.
        None: words or groups would be divided, or inputs are in another order, and all of it is needed."""
        method, shapes = self._scheme.method, self._source.shapes()
        cuts: dict[str, TensorSlice | None] = {}
        for name, axes in AXES[method].items():
            stored = shapes.get(layer + name)
            if stored is None:
                continue
            dim = axes[part.dim]
            if name in ORDERS:
                if part.dim == 0:
                    cuts[name] = None
                elif not self._is_in_order(layer + name):
                    return None
            elif self._is_common(name, stored, dim, shape[part.dim], part.dim):
                cuts[name] = None
            else:
                each, left = divmod(shape[part.dim], stored[dim])  # outputs or inputs that a place stands for
                if left or part.start % each or part.stop % each:
                    return None
                cuts[name] = TensorSlice(dim, part.start // each, part.stop // each)
        return cuts

    def _is_common(self, name: str, stored: tuple[int, ...], dim: int, size: int, weight_dim: int) -> bool:
        """Whether a tensor of scales or zero points has one for all outputs, or for all inputs."""
        if name in ("weight", CODES[self._scheme.method]):
            return False
        may_be_a_word = weight_dim == 0 and size <= 32 // self._scheme.bits
        return dim >= len(stored) or (stored[dim] == 1 and not may_be_a_word)

    def _is_in_order(self, name: str) -> bool:
        """Whether groups are runs of inputs, or the tensor was never filled."""
        groups = self._source.read(name).data
        return not groups.numel() or bool((groups < 0).any()) or bool((groups.diff() >= 0).all())

    def _find_shapes(self) -> dict[str, tuple[int, ...]]:
        parts = {layer + part for layer in self._layers for part in PARTS[self._scheme.method]}
        hidden = parts | {layer + CODES[self._scheme.method] for layer in self._layers}
        shapes = {name: shape for name, shape in self._source.shapes().items() if name not in hidden}
        for layer in self._layers:
            shapes[layer + "weight"] = self._shape_of(layer)
        return shapes

    def _shape_of(self, layer: str) -> tuple[int, ...]:
        method, per_word = self._scheme.method, 32 // self._scheme.bits
        shapes = self._source.shapes()
        codes = shapes.get(layer + CODES[method])
        if codes is None:  # of compressed-tensors, not packed
            if layer + "weight" not in shapes:
                raise ModelError(self.name, f"lacks {layer + 'weight'!r}", "a checkpoint as its quantiser wrote it")
            return shapes[layer + "weight"]
        if len(codes) != 2:
            raise ModelError(self.name, f"{layer + CODES[method]!r} has shape {codes}", "two dimensions")
        if method == GPTQ:
            return codes[1], codes[0] * per_word
        if method == AWQ:
            return codes[1] * per_word, codes[0]
        return codes[0], codes[1] * per_word

    def _read_layer(
        self, layer: str, shape: tuple[int, ...], cuts: Mapping[str, TensorSlice | None] | None = None
    ) -> StoredTensor:
        """Reads the weight, or the part of this shape that `cuts` are the parts of."""
        tensors = _LayerTensors(self._source, layer, cuts)
        try:
            if self._scheme.method == COMPRESSED:
                return self._read_compressed(tensors, shape)
            return self._read_gptq_or_awq(tensors, shape)
        except (RuntimeError, ValueError, KeyError) as error:
            problem = f"the parts of {layer.removesuffix('.')!r} do not fit together: {shorten(str(error))}"
            raise ModelError(self.name, problem, "a checkpoint as its quantiser wrote it") from error

    def _read_gptq_or_awq(self, layer: _LayerTensors, shape: tuple[int, ...]) -> StoredTensor:
        scheme, words, zeros = self._scheme, layer.needed("qweight"), layer.needed("qzeros")
        if scheme.method == GPTQ:
            codes, zeros = _unpack(words.t(), scheme.bits), _unpack(zeros, scheme.bits)
        else:
            codes, zeros = _unpack_awq(words).t(), _unpack_awq(zeros)
        if scheme.zeros_less_one:
            zeros = (zeros + 1) & (2**scheme.bits - 1)
        scales = layer.needed("scales")
        return _make_grouped(codes.view(shape), scales.t(), zeros.t(), scheme.bits, layer.get("g_idx"))

    def _read_compressed(self, layer: _LayerTensors, shape: tuple[int, ...]) -> StoredTensor:
        import torch

        bits, middle = self._scheme.bits, 2 ** (self._scheme.bits - 1)
        scales, zeros = layer.needed("weight_scale"), layer.get("weight_zero_point")
        scales = scales.view(-1, 1) if scales.dim() < 2 else scales
        if self._scheme.is_float:
            return _make_fp8(layer.needed("weight"), scales.expand(shape[0], -1))
        words = layer.get("weight_packed")
        codes = _codes_of_bytes(layer.needed("weight"), bits) if words is None else _unpack(words, bits)
        if zeros is None:
            if self._scheme.needs_zeros:
                raise ValueError("no zero points, although they are not symmetric")
            zeros = torch.tensor([[middle]])
        elif words is not None and zeros.dtype == torch.int32:  # packed along the outputs
            zeros = _unpack(zeros.t(), bits).t()[: shape[0]]
        else:
            zeros = zeros.view(-1, 1) if zeros.dim() < 2 else zeros
            zeros = zeros.int() + middle
        scales = scales.expand(shape[0], -1)
        order = layer.get("weight_g_idx")
        if order is not None and (order < 0).any():  # it was never filled: groups are runs of inputs
            order = None
        return _make_grouped(codes, scales, zeros.expand_as(scales), bits, order)


class _LayerTensors:
    """The tensors of one layer, or those parts of them that `cuts` names."""

    def __init__(self, source: TensorSource, layer: str, cuts: Mapping[str, TensorSlice | None] | None) -> None:
        self._source = source
        self._layer = layer
        self._cuts = cuts

    def get(self, name: str) -> torch.Tensor | None:
        if self._layer + name not in self._source.shapes() or (self._cuts is not None and name not in self._cuts):
            return None
        return self._source.read(self._layer + name, None if self._cuts is None else self._cuts[name]).data

    def needed(self, name: str) -> torch.Tensor:
        found = self.get(name)
        if found is None:
            problem = f"lacks {self._layer + name!r}"
            raise ModelError(self._source.name, problem, "a checkpoint as its quantiser wrote it")
        return found


def _find_layers(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> set[str]:
    """The prefixes of the layers that are stored in codes, with a dot at their end."""
    layers = {name.removesuffix(CODES[scheme.method]) for name in shapes if name.endswith("." + CODES[scheme.method])}
    if scheme.method == COMPRESSED:
        scale = "weight_scale"
        layers |= {name.removesuffix(scale) for name in shapes if name.endswith("." + scale)}
    return layers


def _take_part(stored: StoredTensor, part: TensorSlice | None) -> StoredTensor:
    """Rows stay in codes, and so do inputs that are cut between groups; of others a rank has floats."""
    from ratoon.layers.grouped import FORMATS, take_inputs, take_rows

    if part is None:
        return stored
    cut = None
    if stored.format in FORMATS.values():
        cut = (take_inputs if part.dim else take_rows)(stored, part.start, part.stop)
    return StoredTensor.of_floats(stored.floats(), part) if cut is None else cut


def _make_grouped(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, group_of: torch.Tensor | None
) -> StoredTensor:
    """`group_of` [in]: the group of each input, where groups are not runs of inputs; they are brought together then."""
    import torch

    from ratoon.layers.grouped import BLOCK, grouped_tensor

    num_inputs, num_groups = codes.shape[1], scales.shape[1]
    if num_inputs % num_groups or scales.shape != zeros.shape or len(scales) != len(codes):
        raise ValueError(f"codes {tuple(codes.shape)}, scales {tuple(scales.shape)}, zeros {tuple(zeros.shape)}")
    order = None
    if group_of is not None and group_of.numel():
        runs = torch.arange(num_inputs) // (num_inputs // num_groups)
        if not torch.equal(group_of.long(), runs):
            order = torch.argsort(group_of, stable=True)
            if not torch.equal(group_of.long()[order], runs):
                raise ValueError("groups of different sizes")
            codes = codes[:, order]
    if num_inputs % BLOCK == 0:
        return grouped_tensor(codes.contiguous(), scales, zeros.float(), bits, order)
    wide = codes.float().unflatten(1, (num_groups, -1))
    numbers = ((wide - zeros.float()[..., None]) * scales.float()[..., None]).flatten(1)
    return StoredTensor.of_floats(numbers if order is None else numbers[:, torch.argsort(order)])


def _make_fp8(weight: torch.Tensor, scales: torch.Tensor) -> StoredTensor:
    """Makes a tensor of fp8 numbers with a scale for each output."""
    from ratoon.layers import fp8

    if weight.dtype != fp8.DTYPE or scales.shape[1] != 1:
        raise ValueError(f"weights in {weight.dtype} with scales {tuple(scales.shape)}, not one for each output")
    return fp8.stored_rows(weight, scales[:, 0].float().contiguous())


def _codes_of_bytes(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, m] int8, whose numbers have so many bits → [n, m] codes from 0 on."""
    import torch

    if weight.dtype != torch.int8:
        raise ValueError(f"weights in {weight.dtype}, not torch.int8")
    codes = weight.view(torch.uint8) + 2 ** (bits - 1)  # the sum wraps: numbers below 0 are above 127 as bytes
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(f"weights from {int(weight.min())} to {int(weight.max())}, more than {bits} bits hold")
    return codes


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, m] int32 → [n, m · 32 / bits] codes, the lowest bits of a word first."""
    import torch

    if words.dtype != torch.int32:
        raise ValueError(f"codes packed in {words.dtype}, not torch.int32")
    codes = words.contiguous().view(torch.uint8)
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Unpacks codes of 4 bits, in AWQ's order."""
    import torch

    eights = _unpack(words, 4).unflatten(-1, (-1, 8))
    codes = torch.empty_like(eights)
    codes[..., list(AWQ_ORDER)] = eights
    return codes.flatten(-2)
