"""Ops for float32 on a CPU, by the kernels in native/. Weights are packed once into the layout the product reads; those
of quantised files stay in their own bits (native_formats.py), and those in bf16 or fp16 do, too.

Every kernel computes a row from that row alone, in a fixed order: a request's results are bit-identical in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ratoon.layers import fp8
from ratoon.layers.native import ExpertWeight, kernel_set_name, library, reason_for_none
from ratoon.layers.native.pages import new_weight
from ratoon.layers.native.recording import new_floats
from ratoon.layers.native_adapters import NativeLowRank, NativeTables
from ratoon.layers.native_choices import KernelChoices
from ratoon.layers.native_experts import NativeExperts, NativeRouter, PackedExpert
from ratoon.layers.native_formats import (
    BLOCK,
    BLOCK_READERS,
    KeptFormats,
    KeptTable,
    QuantisedGatedMLP,
    QuantisedLinear,
)
from ratoon.layers.ops import (
    ExpertGate,
    ExpertProducts,
    ExpertWeights,
    FusedProduct,
    HeadProduct,
    JoinedProducts,
    Lookup,
    LowRankProducts,
    Product,
    Router,
    RoutingRule,
    SavedTables,
    WeightFormat,
    WeightUse,
)
from ratoon.layers.products import make_product
from ratoon.layers.stored import StoredTensor
from ratoon.layers.torch_ops import TorchExperts, mask_lookup

Tensor = torch.Tensor

DTYPES_16 = {"BF16": torch.bfloat16, "F16": torch.float16}  # by the names of stored tensors
NO_ACTIVATION = -1
_ACTIVATIONS = {"silu": 0, "relu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "gelu": 3, "quick_gelu": 4}


class NativeLinear:
    """[T, in] → [T, out] with a packed weight, in float32 or in 16 bits. Numbers in 16 bits are widened while they are
    multiplied: the results are those of the same numbers in float32, to the bit."""

    __slots__ = ("_bias", "_kernels", "_packed", "bias_pointer", "in_features", "out_features", "packed_pointer")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        kernels = library()
        assert kernels is not None
        self.out_features, self.in_features = shape = tuple(weight.shape)
        weight = weight.contiguous()
        has_16_bits = weight.dtype in DTYPES_16.values()
        measure = kernels.ratoon_packed_size_16 if has_16_bits else kernels.ratoon_packed_size
        self._packed = new_weight(measure(*shape), dtype=torch.float32)
        self.packed_pointer = self._packed.data_ptr()
        if has_16_bits:
            is_bf16 = weight.dtype == torch.bfloat16
            kernels.ratoon_pack_weight_16(weight.data_ptr(), *shape, is_bf16, self.packed_pointer)
        else:
            kernels.ratoon_pack_weight(weight.data_ptr(), *shape, self.packed_pointer)
        self._bias = None if bias is None else bias.contiguous()
        self.bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        y = new_floats(x.shape[0], self.out_features)
        self.write(x, y)
        return y

    def write(self, x: Tensor, y: Tensor) -> None:
        """Writes the product to y [T, out], which may be some columns of a larger tensor."""
        self._kernels.ratoon_linear(
            x.data_ptr(), x.stride(0), x.shape[0], self.packed_pointer, self.in_features, self.out_features,
            self.bias_pointer, y.data_ptr(), y.stride(0),
        )  # fmt: skip


class EncoderLinear:
    """[T, in] → [T, out] with the packed weight of a NativeLinear, for sequences that run whole, and with an activation
    behind it. Where the processor multiplies matrices in bf16, numbers have 16 bits in it (native/encoder_linear.c):
    faster than float32, with a relative error of about 2^-19. A row has the same bits beside any others."""

    __slots__ = ("_activation", "_kernels", "_linear", "out_features")

    def __init__(self, linear: NativeLinear, activation: int = NO_ACTIVATION) -> None:
        kernels = library()
        assert kernels is not None
        self._kernels, self._linear, self._activation = kernels, linear, activation
        self.out_features = linear.out_features

    def __call__(self, x: Tensor) -> Tensor:
        y = new_floats(x.shape[0], self.out_features)
        self.write(x, y)
        return y

    def write(self, x: Tensor, y: Tensor) -> None:
        """Writes the product to y [T, out], which may be some columns of a larger tensor."""
        linear = self._linear
        failed = self._kernels.ratoon_encoder_linear(
            x.data_ptr(), x.stride(0), x.shape[0], linear.packed_pointer, linear.in_features, linear.out_features,
            linear.bias_pointer, self._activation, y.data_ptr(), y.stride(0),
        )  # fmt: skip
        if failed:
            raise MemoryError("the product of an encoder ran out of memory")

    def with_activation(self, activation: int) -> EncoderLinear:
        """Returns the same product with an activation, by the kernels' number, behind it."""
        return EncoderLinear(self._linear, activation)


class NativeHeadProduct:
    """[T, heads, kept + in] → [T, heads, kept + out]: see Ops.make_head_product."""

    weight: Tensor | None = None  # it is packed

    def __init__(self, weight: Tensor, kept: int) -> None:
        kernels = library()
        assert kernels is not None
        self._kernels = kernels
        self._heads, self._out, self._in = weight.shape
        self._kept = kept
        size = kernels.ratoon_packed_size(self._out, self._in)
        self._packed = new_weight(self._heads, size, dtype=torch.float32)
        for own, packed in zip(weight, self._packed):
            own = own.float().contiguous()
            kernels.ratoon_pack_weight(own.data_ptr(), self._out, self._in, packed.data_ptr())

    def __call__(self, x: Tensor) -> Tensor:
        y = new_floats(x.shape[0], self._heads * (self._kept + self._out))
        failed = self._kernels.ratoon_head_products(
            x.data_ptr(), x.stride(0), x.shape[0], self._heads, self._kept, self._in, self._out,
            self._packed.data_ptr(), self._packed.shape[1], y.data_ptr(), y.stride(0),
        )  # fmt: skip
        if failed:
            raise MemoryError("the product of heads ran out of memory")
        return y.view(-1, self._heads, self._kept + self._out)


class NativeGatedMLP:
    """[T, H] → [T, H]: two products and the activation between them, in one call."""

    __slots__ = ("_down", "_gate_up", "_kernels")

    def __init__(self, gate_up: NativeLinear, down: NativeLinear) -> None:
        kernels = library()
        assert kernels is not None
        assert gate_up.out_features == 2 * down.in_features
        self._gate_up = gate_up
        self._down = down
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        gate_up, down, rows = self._gate_up, self._down, x.shape[0]
        between = new_floats(rows, 3 * down.in_features)  # gate and up side by side, then the input of down
        y = new_floats(rows, down.out_features)
        self._kernels.ratoon_gated_mlp(
            x.data_ptr(), x.stride(0), rows, gate_up.packed_pointer, gate_up.bias_pointer, gate_up.in_features,
            down.packed_pointer, down.bias_pointer, down.in_features, down.out_features, between.data_ptr(),
            y.data_ptr(),
        )  # fmt: skip
        return y


class JoinedLinears:
    """[T, in] → [T, all outs]: each product writes its own columns."""

    __slots__ = ("_sizes", "out_features", "products")

    def __init__(self, products: Sequence[NativeLinear | EncoderLinear | QuantisedLinear]) -> None:
        self.products = products
        self._sizes = [product.out_features for product in products]
        self.out_features = sum(self._sizes)

    def __call__(self, x: Tensor) -> Tensor:
        y = new_floats(x.shape[0], self.out_features)
        for product, columns in zip(self.products, y.split_with_sizes(self._sizes, 1), strict=True):
            product.write(x, columns)
        return y


class Kept16Bits:
    """Weights that the file has in bf16 or fp16, kept as they are: half the memory of float32, and the same results."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_weights = 0
        self._tables: list[StoredTensor] = []

    def make_linear(self, parts: Sequence[StoredTensor], bias: Tensor | None) -> NativeLinear:
        if not any(parts[0] is table for table in self._tables):  # the head may have the weight of the table
            self.num_weights += sum(part.data.numel() for part in parts)
        return NativeLinear(parts[0].data if len(parts) == 1 else torch.cat([part.data for part in parts]), bias)

    def make_embedding(self, table: StoredTensor) -> Callable[[Tensor], Tensor]:
        self.num_weights += table.data.numel()
        self._tables.append(table)
        return KeptTable(self.name, table.data.contiguous(), table.shape[1])

    def facts(self) -> dict[str, Any]:
        product = f"float32, widened from 16 bits ({kernel_set_name()})"
        num_bytes = 2 * self.num_weights
        return {"format": self.name, "num_weights": self.num_weights, "num_bytes": num_bytes, "product": product}


class Encoder16Bits:
    """The format of weights kept in 16 bits, for the layers of an encoder: their products are EncoderLinear."""

    def __init__(self, kept: Kept16Bits) -> None:
        self.name = kept.name
        self._kept = kept

    def make_linear(self, parts: Sequence[StoredTensor], bias: Tensor | None) -> Product:
        return EncoderLinear(self._kept.make_linear(parts, bias))

    def make_embedding(self, table: StoredTensor) -> Callable[[Tensor], Tensor]:
        return self._kept.make_embedding(table)


class NativeOps:
    name = "native"
    defers_norms = False

    def __init__(
        self, keep_formats: bool = True, bits: int | None = None, choices: KernelChoices | None = None
    ) -> None:
        """`keep_formats`: quantised weights stay in the bits of their file where there are kernels for it, and products
        of encoders may round. `bits`: 8 or 4, of weights that are floats in the file; None: they stay floats.
        `choices`: the kernels of products."""
        kernels = library()
        assert kernels is not None, "ask `native_ops_reasons` first"
        self._kernels = kernels
        self.bits = bits
        self.formats = KeptFormats(None if choices is None else choices.add) if keep_formats else None
        self.formats_16 = {name: Kept16Bits(name) for name in DTYPES_16}
        self._is_for_encoders = False

    def for_encoders(self) -> NativeOps:
        if self.formats is None:
            return self
        ops = copy(self)
        ops._is_for_encoders = True
        return ops

    def find_format(self, stored: StoredTensor) -> WeightFormat | None:
        if stored.format in self.formats_16 and stored.decode is not None and not stored.transposed:
            kept = self.formats_16[stored.format]
            return Encoder16Bits(kept) if self._is_for_encoders else kept
        return None if self.formats is None else self.formats.find(stored)

    def quantize(self, stored: StoredTensor, use: WeightUse) -> StoredTensor:
        """Tables and heads keep 8 bits at least: their errors go straight into the logits. Numbers of 16 bits stay as
        they are where they are not to have fewer. Floats of 8 bits, with which there are no products, become integers
        of as many where formats are kept."""
        if use is not WeightUse.OTHER and stored.format in fp8.FORMATS and self.formats is not None:
            if stored.transposed or stored.shape[1] % BLOCK:
                return stored
            bits = self.bits or 8
            return encode(stored.floats(), max(bits, 8) if use is WeightUse.VOCABULARY else bits)
        if use is WeightUse.OTHER or stored.decode is not None or len(stored.shape) != 2:
            return stored
        if self.bits is not None and self.formats is not None and can_encode(stored):
            return encode(stored.data, max(self.bits, 8) if use is WeightUse.VOCABULARY else self.bits)
        return replace(stored, decode=_widen) if stored.format in self.formats_16 else stored

    def note_on(self, stored: StoredTensor, use: WeightUse) -> str | None:
        if self.formats is None or use is WeightUse.OTHER:
            return None
        if stored.decode is None or stored.format in self.formats_16:
            wanted = self.bits is not None and len(stored.shape) == 2 and not can_encode(stored)
            return f"kept as floats, since {BLOCK} does not divide the inputs" if wanted else None
        if stored.format in fp8.FORMATS and not stored.transposed:
            return f"decoded to floats, since {BLOCK} does not divide the inputs"
        return self.formats.note_on(stored)

    def kept_formats(self) -> list[dict[str, Any]]:
        kept = [one.facts() for one in self.formats_16.values() if one.num_weights]
        return kept if self.formats is None else kept + self.formats.facts()

    def make_linear(self, weight: Tensor, bias: Tensor | None) -> Product:
        linear = NativeLinear(weight, bias)
        return EncoderLinear(linear) if self._is_for_encoders else linear

    def join(self, products: Sequence[Product]) -> Product:
        writers = [
            product for product in products if isinstance(product, NativeLinear | EncoderLinear | QuantisedLinear)
        ]
        if len(writers) == len(products):
            return JoinedLinears(writers)
        return lambda x: torch.cat([multiply(x) for multiply in products], dim=-1)

    def make_low_rank(
        self,
        num_inputs: int,
        num_outputs: Sequence[int],
        num_slots: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
        takes_weights: bool = False,
    ) -> LowRankProducts:
        return NativeLowRank(num_inputs, num_outputs, num_slots, self._has_few_bits)

    def join_low_rank(
        self, product: Product, num_outputs: Sequence[int], num_slots: int, max_rank: int
    ) -> JoinedProducts | None:
        return None  # a pass that is recorded reads the table of slots at each run

    def make_saved_tables(self, num_slots: int, rows: range, device: torch.device, dtype: torch.dtype) -> SavedTables:
        return NativeTables(num_slots, rows)

    @property
    def _has_few_bits(self) -> bool:
        """Whether some weights are quantised: what adapters lose in 8 bits is far below what these have lost."""
        return self.formats is not None and bool(self.formats.facts())

    def make_gated_mlp(self, gate_up: Product, down: Product) -> Product:
        if isinstance(gate_up, NativeLinear) and isinstance(down, NativeLinear):
            return NativeGatedMLP(gate_up, down)
        if isinstance(gate_up, QuantisedLinear) and isinstance(down, QuantisedLinear):
            return QuantisedGatedMLP(gate_up, down)
        return lambda x: down(self.silu_and_mul(gate_up(x)))

    def make_router(self, rule: RoutingRule, bias: Tensor | None, counts: Tensor | None = None) -> Router:
        return NativeRouter(rule, bias, counts)

    def make_experts(self, experts: Iterable[ExpertWeights], own: range, gate: ExpertGate) -> ExpertProducts:
        """Weights that no kernel multiplies as they are, such as those whose inputs are in another order, are
        multiplied expert by expert."""
        products: list[tuple[Product, Product]] = []
        packed: list[tuple[PackedExpert, PackedExpert]] = []
        for one in experts:
            gate_up = make_product(self, [one.gate, one.up], one.gate_up_bias)
            down = make_product(self, [one.down], one.down_bias)
            products.append((gate_up, down))
            parts = _packed_expert(gate_up), _packed_expert(down)
            if parts[0] is not None and parts[1] is not None:
                packed.append((parts[0], parts[1]))
        if len(packed) < len(own) or len({len(first.parts) for first, _ in packed}) > 1:
            return TorchExperts(self, products, own, gate)
        return NativeExperts(packed, own, gate, _ACTIVATIONS)

    def make_head_product(self, weight: Tensor, kept: int = 0) -> HeadProduct:
        return NativeHeadProduct(weight, kept)

    def add_gated(self, y: Tensor, x: Tensor, gates: Tensor) -> Tensor:
        self._kernels.ratoon_add_gated(y.data_ptr(), x.data_ptr(), gates.data_ptr(), gates.stride(0), *x.shape)
        return y

    def clamped_swiglu(self, x: Tensor, limit: float) -> Tensor:
        rows, double = x.shape
        y = new_floats(rows, double // 2)
        self._kernels.ratoon_clamped_swiglu(x.data_ptr(), x.stride(0), y.data_ptr(), rows, double // 2, limit)
        return y

    def fuse(self, product: Product) -> FusedProduct | None:
        return None

    def fuse_activation(self, product: Product, kind: str) -> Product | None:
        return product.with_activation(_ACTIVATIONS[kind]) if isinstance(product, EncoderLinear) else None

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        return _float_table(table)(ids)

    def cut_embedding(self, lookup: Lookup, table: StoredTensor, rows: range, vocab_size: int) -> Lookup:
        if table.decode is None:
            lookup = _float_table(table.data)
        if isinstance(lookup, KeptTable):
            return lookup.as_part(rows.start, vocab_size)
        return mask_lookup(lookup, rows)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        self._kernels.ratoon_scale(x.data_ptr(), x.stride(0), *x.shape, factor)
        return x

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        self._kernels.ratoon_add(x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), *x.shape)
        return x

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        self._kernels.ratoon_soft_cap(x.data_ptr(), x.stride(0), *x.shape, cap)
        return x

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = x.shape
        y = new_floats(rows, width)
        self._kernels.ratoon_rms_norm(
            x.data_ptr(), x.stride(0), None, 0, weight.data_ptr(), eps, y.data_ptr(), rows, width
        )
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = x.shape
        y = new_floats(rows, width)
        self._kernels.ratoon_rms_norm(
            x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), weight.data_ptr(), eps, y.data_ptr(),
            rows, width,
        )  # fmt: skip
        return y

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._layer_norm(x, None, weight, bias, eps)

    def add_layer_norm(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._layer_norm(x, residual, weight, bias, eps)

    def _layer_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        rows, width = x.shape
        y = new_floats(rows, width)
        self._kernels.ratoon_layer_norm(
            x.data_ptr(), x.stride(0), None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(),
            eps, y.data_ptr(), rows, width,
        )  # fmt: skip
        return y

    def head_rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> None:
        rows, heads, head_dim = x.shape
        ldw = head_dim if weight.dim() == 2 else 0
        self._kernels.ratoon_head_rms_norm(
            x.data_ptr(), x.stride(0), weight.data_ptr(), ldw, eps, rows, heads, head_dim
        )

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, axes: Tensor | None = None) -> None:
        rows, heads, head_dim = q.shape
        self._kernels.ratoon_rotary(
            q.data_ptr(), q.stride(0), heads, k.data_ptr(), k.stride(0), k.shape[1], head_dim, cos_sin.shape[1],
            positions.data_ptr(), cos_sin.data_ptr(), None if axes is None else axes.data_ptr(), positions.stride(0),
            rows,
        )  # fmt: skip

    def silu_and_mul(self, x: Tensor) -> Tensor:
        rows, double = x.shape
        y = new_floats(rows, double // 2)
        self._kernels.ratoon_silu_and_mul(x.data_ptr(), x.stride(0), y.data_ptr(), rows, double // 2)
        return y

    def gated_activation(self, x: Tensor, kind: str) -> Tensor:
        rows, double = x.shape
        y = new_floats(rows, double // 2)
        self._kernels.ratoon_gated_activation(
            x.data_ptr(), x.stride(0), y.data_ptr(), rows, double // 2, _ACTIVATIONS[kind]
        )
        return y

    def activation(self, x: Tensor, kind: str) -> Tensor:
        rows, width = x.shape
        y = new_floats(rows, width)
        self._kernels.ratoon_activation(x.data_ptr(), x.stride(0), y.data_ptr(), rows, width, _ACTIVATIONS[kind])
        return y


def _packed_expert(product: Product) -> PackedExpert | None:
    """A product as the kernels of experts read it; None: it is of another kind."""
    if isinstance(product, NativeLinear):
        weight = ExpertWeight(product.packed_pointer, product.bias_pointer, None)
        return PackedExpert([(weight, product)], product.in_features, product.out_features)
    if isinstance(product, QuantisedLinear):
        weight = ExpertWeight(None, None, product.weight.pointer)
        return PackedExpert([(weight, product)], product.weight.in_features, product.out_features)
    if isinstance(product, JoinedLinears):
        packed = [_packed_expert(one) for one in product.products]
        if len({None if one is None else one.out_features for one in packed}) == 1 and packed[0] is not None:
            parts = [part for one in packed if one is not None for part in one.parts]
            return PackedExpert(parts, packed[0].in_features, product.out_features)
    return None


def _float_table(table: Tensor) -> KeptTable:
    return KeptTable("F32", table if table.stride(1) == 1 else table.contiguous(), table.shape[1])


def _widen(numbers: Tensor) -> Tensor:
    return numbers.float()


def native_ops_reasons(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Why NativeOps can't serve this device and dtype; empty when it can."""
    reasons = []
    if device.type != "cpu":
        reasons.append(f"the kernels are for the CPU, not for {device.type}")
    if dtype != torch.float32:
        reasons.append(f"the kernels compute in float32, not in {dtype}")
    if library() is None:
        reasons.append(reason_for_none())
    return reasons


def set_native_threads(count: int) -> None:
    kernels = library()
    if kernels is not None:
        kernels.ratoon_set_threads(count)


# ---- weights of floats to 8 or 4 bits while they are loaded ----
# In formats that native_formats.py keeps: Q8_0, and Q4_1 with the scales and offsets of least squared error.

FORMATS = {8: "Q8_0", 4: "Q4_1"}  # by bits


def can_encode(stored: StoredTensor) -> bool:
    """Whether it is a weight [out, in] of floats that blocks divide."""
    return stored.decode is None and len(stored.shape) == 2 and stored.shape[1] % BLOCK == 0


def encode(weight: Tensor, bits: int) -> StoredTensor:
    """A weight [out, in] in GGUF's blocks. Numbers that halves can't scale (infinite, NaN) give unusable scales, and so
    unusable results, as they would in floats."""
    kernels = library()
    assert kernels is not None
    numbers = weight.float().contiguous()
    blocks = (len(numbers), numbers.shape[1] // BLOCK)
    scales, offsets = torch.empty(blocks), torch.empty(blocks) if bits == 4 else None
    num_blocks = blocks[0] * blocks[1]
    kernels.ratoon_fit_scales(
        numbers.data_ptr(), num_blocks, bits, scales.data_ptr(), None if offsets is None else offsets.data_ptr()
    )
    halves = [part.half() for part in (scales, offsets) if part is not None]
    rounded = [part.float() for part in halves]
    codes = torch.empty(*blocks, BLOCK * bits // 8, dtype=torch.uint8)
    kernels.ratoon_encode(
        numbers.data_ptr(), num_blocks, bits, rounded[0].data_ptr(),
        rounded[1].data_ptr() if offsets is not None else None, codes.data_ptr(),
    )  # fmt: skip
    data = torch.cat([part[..., None].view(torch.uint8) for part in halves] + [codes], -1)
    return StoredTensor(tuple(weight.shape), FORMATS[bits], data, partial(_decode, FORMATS[bits]))


def _decode(name: str, blocks: Tensor) -> Tensor:
    return BLOCK_READERS[name](blocks).floats().flatten()
