"""Ops for CUDA by the Triton kernels in triton/, with cuBLAS for products of many rows. Importing this imports triton.

No method synchronises with the device, or launches anything that depends on values on it: all can be captured in a
CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ratoon.layers import fp8
from ratoon.layers.gpu import has_gluon, has_wgmma
from ratoon.layers.invariant_choices import Segments, segments_of, wide_of
from ratoon.layers.ops import (
    ExpertGate,
    ExpertProducts,
    ExpertWeights,
    FusedProduct,
    HeadProduct,
    JoinedProducts,
    LowRankProducts,
    Product,
    RMSWeights,
    Router,
    RoutingRule,
    SavedTables,
    WeightFormat,
    WeightUse,
)
from ratoon.layers.product_choices import (
    PANEL_OUTPUTS,
    Choice,
    Panel,
    ProductChoices,
    Stream,
    Tile,
    dtype_name,
    invariant_choice,
)
from ratoon.layers.stored import StoredTensor
from ratoon.layers.torch_internals import scaled_product
from ratoon.layers.torch_ops import TorchOps, route
from ratoon.layers.triton import elementwise, norms
from ratoon.layers.triton import experts as experts_kernels
from ratoon.layers.triton.gemv import MAX_NORM_WIDTH, gemv
from ratoon.layers.triton.joined import TritonJoined, can_join
from ratoon.layers.triton.low_rank import TritonLowRank, TritonTables
from ratoon.layers.triton.matmul import matmul
from ratoon.layers.triton.quantize import quantize_rows

Tensor = torch.Tensor

ALIGNMENT = 16  # bytes, of weights that kernels copy in boxes
FEW_ROWS = (Tile, Panel, Stream)  # kernels that take their neighbours in


class CudaLinear:
    """[T, in] → [T, out]: a kernel of our own where it is faster, the library's elsewhere."""

    __slots__ = ("arrivals", "beyond", "bias", "choices", "dependent", "scales", "segments", "weight")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        choices: Sequence[Choice],
        beyond: Choice = None,
        dependent: bool = False,
        scales: Tensor | None = None,
        segments: Segments | None = None,
    ) -> None:
        """`choices`: by number of rows; `beyond`: for more rows. `scales` [out]: of a weight in 8 bits. `segments`: how
        sums are cut where they must have the same bits with any number of rows; `choices` are theirs then."""
        self.weight = weight.contiguous()
        if self.weight.data_ptr() % ALIGNMENT:
            self.weight = self.weight.clone()
        self.bias = bias
        self.choices = choices
        self.beyond = beyond
        self.dependent = dependent
        self.scales = scales
        self.segments = segments
        # Of programs that share sums (triton/panel.py), from the start: a graph may not allocate it.
        num_tiles = -(-len(weight) // PANEL_OUTPUTS)
        self.arrivals = torch.zeros(num_tiles, dtype=torch.int32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.fused(x, None, None)

    def fused(self, x: Tensor, norm: RMSWeights | None, residual: Tensor | None) -> Tensor:
        rows = x.shape[0]  # len(x) would cost half a microsecond
        choice = self.choices[rows] if rows < len(self.choices) else self.beyond
        if isinstance(choice, FEW_ROWS):
            return self.multiply_few(x, choice, norm, residual)
        if self.segments is not None:
            return self.multiply_in_segments(x, self.segments, norm, residual)
        if self.scales is not None:
            return self.multiply_8_bits(x, self.scales, norm, residual)
        if norm is not None:
            x = norms.rms_norm(x, *norm, dependent=self.dependent)
        if choice is not None:
            return matmul(x, self.weight, self.bias, choice, residual)
        if residual is None:
            return functional.linear(x, self.weight, self.bias)
        if self.bias is not None:
            return residual.add_(functional.linear(x, self.weight, self.bias))
        return residual.addmm_(x, self.weight.t())

    def multiply_few(
        self,
        x: Tensor,
        choice: Tile | Panel | Stream,
        norm: RMSWeights | None,
        residual: Tensor | None,
        is_gate: bool = False,
    ) -> Tensor:
        """One kernel, as far as it can. `is_gate`: with silu of the first half of the outputs times the second."""
        if isinstance(choice, Stream):
            return self.multiply_by_stream(x, choice, norm, residual, is_gate)
        can_norm = choice.splits == 1 if isinstance(choice, Panel) else x.shape[1] <= MAX_NORM_WIDTH
        if self.segments is not None:
            can_norm = self.segments.takes_norm
        if norm is not None and not can_norm:
            x, norm = norms.rms_norm(x, *norm, dependent=self.dependent), None
        if isinstance(choice, Panel):
            from ratoon.layers.triton.panel import panel_product

            return panel_product(
                x, self.weight, self.bias, choice, self.arrivals,
                scales=self.scales, norm=norm, gated=is_gate, residual=residual, dependent=self.dependent,
                segment=None if self.segments is None else self.segments.inputs,
            )  # fmt: skip
        return gemv(
            x, self.weight, self.bias, choice,
            scales=self.scales, norm=norm, gated="silu" if is_gate else None, residual=residual,
            dependent=self.dependent,
        )  # fmt: skip

    def multiply_by_stream(
        self, x: Tensor, choice: Stream, norm: RMSWeights | None, residual: Tensor | None, is_gate: bool
    ) -> Tensor:
        """A kernel for the norm, and for the input in 8 bits where the weight is; then the product."""
        from ratoon.layers.triton.stream import stream_product  # for Hopper alone

        row_scales = None
        if self.scales is not None:
            x, row_scales = quantize_rows(x, norm, False, self.dependent)
        elif norm is not None:
            x = norms.rms_norm(x, *norm, dependent=self.dependent)
        return stream_product(
            x, self.weight, self.bias, choice, self.arrivals,
            scales=self.scales, row_scales=row_scales, gated=is_gate, residual=residual, dependent=self.dependent,
        )  # fmt: skip

    def multiply_in_segments(
        self, x: Tensor, segments: Segments, norm: RMSWeights | None, residual: Tensor | None
    ) -> Tensor:
        """Multiplies many rows, with the bits that the kernels for few rows have."""
        from ratoon.layers.triton.segment_norm import apply_factors
        from ratoon.layers.triton.wide import wide_product  # for Hopper alone

        row_scales = None
        if norm is not None and segments.takes_norm:
            x, row_scales = apply_factors(x, norm, segments.inputs, segments.group, self.dependent)
        elif norm is not None:
            x = norms.rms_norm(x, *norm, dependent=self.dependent)
        return wide_product(
            x, self.weight, self.bias, wide_of(x.shape[0], len(self.weight), segments),
            segments.inputs, segments.group, self.arrivals, row_scales=row_scales, residual=residual,
            dependent=self.dependent,
        )  # fmt: skip

    def multiply_8_bits(
        self, x: Tensor, scales: Tensor, norm: RMSWeights | None, residual: Tensor | None, is_gate: bool = False
    ) -> Tensor:
        """Multiplies with the input in 8 bits too. `is_gate`: the input is silu of the first half of x times the
        second."""
        numbers, row_scales = quantize_rows(x, norm, is_gate, self.dependent)
        product = scaled_product(numbers, self.weight.t(), row_scales, scales[None, :], self.bias, x.dtype)
        return product if residual is None else residual.add_(product)


class CudaGatedMLP:
    """[T, H] → [T, H]. With few rows the gate's activation is part of the first product."""

    __slots__ = ("choices", "down", "gate_up")

    def __init__(self, gate_up: CudaLinear, down: CudaLinear, choices: Sequence[Choice]) -> None:
        self.gate_up = gate_up
        self.down = down
        self.choices = choices

    def __call__(self, x: Tensor) -> Tensor:
        return self.fused(x, None, None)

    def fused(self, x: Tensor, norm: RMSWeights | None, residual: Tensor | None) -> Tensor:
        down = self.down
        if down.scales is not None and x.shape[0] >= max(len(self.choices), len(down.choices)):
            return down.multiply_8_bits(self.gate_up.fused(x, norm, None), down.scales, None, residual, is_gate=True)
        return down.fused(self.gate(x, norm), None, residual)

    def gate(self, x: Tensor, norm: RMSWeights | None = None) -> Tensor:
        """[T, H] → [T, I]: the first product and the activation."""
        gate_up = self.gate_up
        rows = x.shape[0]  # len(x) would cost half a microsecond
        choice = self.choices[rows] if rows < len(self.choices) else None
        if isinstance(choice, FEW_ROWS):
            return gate_up.multiply_few(x, choice, norm, None, is_gate=True)
        return elementwise.gated_activation(gate_up.fused(x, norm, None), "silu", gate_up.dependent)


class InvariantHeadProduct:
    """The product of Ops.make_head_product, of which a row's bits depend on no other row."""

    weight: Tensor | None = None  # these products alone have such bits

    def __init__(self, products: Sequence[Product], kept: int) -> None:
        """`products`: of each head."""
        self._products = products
        self._kept = kept

    def __call__(self, x: Tensor) -> Tensor:
        kept = self._kept
        heads = [product(x[:, head, kept:].contiguous()) for head, product in enumerate(self._products)]
        return torch.cat((x[..., :kept], torch.stack(heads, 1)), -1)


class Fp8Rows:
    """Implements WeightFormat for weights in 8 bits (fp8.py)."""

    def __init__(self, choices: ProductChoices, dependent: bool) -> None:
        self._choices = choices
        self._dependent = dependent
        self.num_weights = 0
        self.num_bytes = 0

    def make_linear(self, parts: Sequence[StoredTensor], bias: Tensor | None) -> Product:
        weight = fp8.join([part.data for part in parts])
        scales = torch.cat([part.extras["scales"] for part in parts])
        if not weight.is_meta:  # there it has a shape and no memory
            self.num_weights += weight.numel()
            self.num_bytes += weight.nbytes + scales.nbytes
        choices = [choice if isinstance(choice, FEW_ROWS) else None for choice in self._choices.of("linear", weight)]
        return CudaLinear(weight, bias, choices, dependent=self._dependent, scales=scales)

    def make_embedding(self, table: StoredTensor) -> Callable[[Tensor], Tensor]:
        raise NotImplementedError("tables are not quantised")


class CudaOps(TorchOps):
    """Implements `Ops`; see there for the shapes."""

    name = "cuda"
    defers_norms = True

    def __init__(
        self,
        choices: ProductChoices | None = None,
        dependent_launch: bool = False,
        batch_invariant: bool = False,
        quantization: str | None = None,
    ) -> None:
        """`choices`: what was measured on this GPU; without, fixed ones. `dependent_launch`: see triton/launch.py.
        `batch_invariant`: a row's products have the same bits in any batch, as norms have anyway. `quantization`:
        "fp8" keeps the weights of linear layers in 8 bits; a step's activations are bfloat16."""
        assert quantization in (None, "fp8") and not (quantization and batch_invariant)
        self.choices = choices or ProductChoices(has_wgmma=has_wgmma(), has_gluon=has_gluon())
        self.dependent_launch = dependent_launch
        self.batch_invariant = batch_invariant
        self.quantization = quantization
        self._fp8_rows = Fp8Rows(self.choices, dependent_launch)

    def quantize(self, stored: StoredTensor, use: WeightUse) -> StoredTensor:
        if self.quantization is None or use is not WeightUse.LINEAR or not fp8.can_quantize(stored.shape):
            return stored
        if stored.format == fp8.FORMAT:
            return stored
        return fp8.quantize_weight(stored.floats())

    def find_format(self, stored: StoredTensor) -> WeightFormat | None:
        fits = stored.format == fp8.FORMAT and self.quantization == "fp8" and fp8.can_quantize(stored.shape)
        return self._fp8_rows if fits else None

    def note_on(self, stored: StoredTensor, use: WeightUse) -> str | None:
        return None

    def kept_formats(self) -> list[dict[str, Any]]:
        rows = self._fp8_rows
        if not rows.num_weights:
            return []
        product = "8-bit weights; 8-bit activations but for few rows with small weights"
        return [{"format": "fp8", "num_weights": rows.num_weights, "num_bytes": rows.num_bytes, "product": product}]

    def make_linear(self, weight: Tensor, bias: Tensor | None) -> Product:
        if self.batch_invariant:
            segments = self.find_segments("linear", weight)
            few = () if segments is None else segments.few
            beyond = invariant_choice(*weight.shape)
            return CudaLinear(weight, bias, few, beyond, self.dependent_launch, segments=segments)
        return CudaLinear(weight, bias, self.choices.of("linear", weight), dependent=self.dependent_launch)

    def make_head_product(self, weight: Tensor, kept: int = 0) -> HeadProduct:
        if not self.batch_invariant:
            return super().make_head_product(weight, kept)
        return InvariantHeadProduct([self.make_linear(own.contiguous(), None) for own in weight], kept)

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
        dependent, one_tile = self.dependent_launch, self.batch_invariant
        return TritonLowRank(
            num_inputs, num_outputs, num_slots, max_rank, device, dtype, dependent, one_tile, takes_weights
        )

    def join_low_rank(
        self, product: Product, num_outputs: Sequence[int], num_slots: int, max_rank: int
    ) -> JoinedProducts | None:
        if not isinstance(product, CudaLinear) or product.scales is not None or self.batch_invariant:
            return None
        if product.weight.is_meta or not can_join(num_outputs, num_slots, max_rank):
            return None
        bias = product.bias

        def make_product(weight: Tensor) -> FusedProduct:
            """The choices are those of the weight without the further rows, which are few."""
            more = None if bias is None else functional.pad(bias, (0, len(weight) - len(bias)))
            return CudaLinear(weight, more, product.choices, product.beyond, self.dependent_launch).fused

        joined = TritonJoined(
            product.weight, num_outputs, num_slots, max_rank, make_product, dependent=self.dependent_launch
        )
        product.weight = joined.weight  # one copy is kept
        return joined

    def make_saved_tables(self, num_slots: int, rows: range, device: torch.device, dtype: torch.dtype) -> SavedTables:
        return TritonTables(num_slots, rows, device, dtype)

    def make_gated_mlp(self, gate_up: Product, down: Product) -> Product:
        if isinstance(gate_up, CudaLinear) and isinstance(down, CudaLinear):
            if not self.batch_invariant:
                return CudaGatedMLP(gate_up, down, self.choices.of("gated", gate_up.weight))
            segments = self.find_segments("gated", gate_up.weight)
            gate_up.choices, gate_up.segments = (), segments  # one order of sums, with the activation and without
            return CudaGatedMLP(gate_up, down, () if segments is None else segments.few)
        return super().make_gated_mlp(gate_up, down)

    def find_segments(self, kind: str, weight: Tensor) -> Segments | None:
        """How the sums of a weight are cut for the same bits in any batch; None: by tiles of one size (matmul.py)."""
        outputs, inputs = weight.shape
        return segments_of(kind, outputs, inputs, dtype_name(weight.dtype)) if self.choices.has_wgmma else None

    def make_router(self, rule: RoutingRule, bias: Tensor | None, counts: Tensor | None = None) -> Router:
        return partial(route if rule.num_groups > 1 else experts_kernels.route, rule, bias, counts)

    def make_experts(self, experts: Iterable[ExpertWeights], own: range, gate: ExpertGate) -> ExpertProducts:
        """The weights of all experts are one tensor for each product."""
        gate_up: Tensor | None = None
        down: Tensor | None = None
        biases: list[tuple[Tensor, Tensor]] = []
        for index, one in enumerate(experts):
            parts = [part.floats() for part in (one.gate, one.up, one.down)]
            inner, hidden = parts[0].shape
            if gate_up is None or down is None:
                gate_up = parts[0].new_empty((len(own), 2 * inner, hidden))
                down = parts[0].new_empty((len(own), hidden, inner))
            gate_up[index, :inner], gate_up[index, inner:], down[index] = parts
            if one.gate_up_bias is not None and one.down_bias is not None:
                biases.append((one.gate_up_bias, one.down_bias))
        assert gate_up is not None and down is not None, "there is an expert"
        joined = None
        if biases:
            first, second = (torch.cat([pair[side] for pair in biases]).view(len(own), -1) for side in (0, 1))
            joined = first, second
        return experts_kernels.TritonExperts(gate_up, down, joined, own, gate, self.batch_invariant)

    def fuse(self, product: Product) -> FusedProduct | None:
        return product.fused if isinstance(product, CudaLinear | CudaGatedMLP) else None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x, weight, eps, dependent=self.dependent_launch)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x, weight, eps, residual, self.dependent_launch)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return norms.layer_norm(x, weight, bias, eps)

    def add_layer_norm(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return norms.layer_norm(x, weight, bias, eps, residual)

    def head_rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> None:
        norms.head_rms_norm(x, weight, eps)

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, axes: Tensor | None = None) -> None:
        elementwise.rotary(q, k, positions, cos_sin, axes)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return elementwise.gated_activation(x, "silu", self.dependent_launch)

    def gated_activation(self, x: Tensor, kind: str) -> Tensor:
        return elementwise.gated_activation(x, kind, self.dependent_launch)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return elementwise.activation(x, kind)
