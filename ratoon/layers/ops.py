"""The arithmetic of layers, as an interface with one implementation for each kind of device.

`TorchOps` (torch_ops.py) runs anywhere and is the reference. `NativeOps` (native/) is for fp32 on a CPU, `CudaOps`
(triton/) for CUDA. A layer uses the Ops of its weights and is independent of the device.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ratoon.layers.stored import StoredTensor

Tensor = torch.Tensor
Product = Callable[[Tensor], Tensor]  # [T, in] → [T, out]
Lookup = Callable[[Tensor], Tensor]  # ids [T] → rows of a table [T, H], in new memory


class WeightUse(enum.Enum):
    """What multiplies by a weight, or reads it; it decides in how many bits Ops keeps it."""

    LINEAR = enum.auto()  # a linear layer of the model's body
    EXPERT = enum.auto()  # the same of an expert, of which a layer has many
    VOCABULARY = enum.auto()  # the vocabulary's table, or the head
    OTHER = enum.auto()  # stays as it is


class RMSWeights(NamedTuple):
    """An RMS norm."""

    weight: Tensor
    eps: float


class FusedProduct(Protocol):
    """A product in one call with what stands beside it."""

    def __call__(self, x: Tensor, norm: RMSWeights | None, residual: Tensor | None) -> Tensor:
        """[T, in] → [T, out] of the norm of x, or of x. With `residual` [T, out], the product is added to that in
        place, and it is returned; x is other memory then."""
        ...


class WeightFormat(Protocol):
    """Products with weights in their file's format."""

    def make_linear(self, parts: Sequence[StoredTensor], bias: Tensor | None) -> Product:
        """Makes a product, as Ops.make_linear does, from a weight in parts of this format, which are concatenated by
        rows."""
        ...

    def make_embedding(self, table: StoredTensor) -> Lookup:
        """Makes the lookup in a table [V, H]."""
        ...


class LowRankProducts(Protocol):
    """The matrices of adapters beside one product, in slots. A slot is loaded while no row of a step has it, by another
    thread than that of the steps."""

    def load(self, slot: int, part: int, a: Tensor | None, b: Tensor, scale: float) -> None:
        """The matrices a [rank, in] and b [out, rank] for one part of the product. Without `a`, b [out, in] is a weight
        with which the product is made in place of its own."""
        ...

    def clear(self, slot: int) -> None:
        """Frees the matrices of all parts: the slot adds nothing."""
        ...

    def add(self, y: Tensor, x: Tensor, slots: Tensor, norm: RMSWeights | None = None) -> None:
        """y [T, all outs] += scale · (x [T, in] · aᵀ) · bᵀ in place, part by part, with the matrices of each row's slot
        [T] int32; -1: nothing is added. y may be a strided view. With `norm`, of the norm of x."""
        ...


class JoinedProducts(Protocol):
    """A product together with the adapters beside it, in slots, as LowRankProducts are; a slot has no whole weight."""

    def load(self, slot: int, part: int, a: Tensor | None, b: Tensor, scale: float) -> None: ...

    def clear(self, slot: int) -> None: ...

    def multiply(self, x: Tensor, norm: RMSWeights | None, residual: Tensor | None, slots: Tensor) -> Tensor:
        """The product of x [T, in], or of its norm, with what the adapter in each row's slot [T] int32 adds to it; -1:
        nothing. It is added to `residual` [T, out] in place where that is given, which is returned then."""
        ...

    def multiply_gate(self, x: Tensor, norm: RMSWeights | None, slots: Tensor) -> Tensor:
        """silu_and_mul of it: [T, out / 2]."""
        ...


class SavedTables(Protocol):
    """Tables of tokens that adapters have in place of the model's, in slots."""

    def load(self, slot: int, table: Tensor) -> None:
        """The rows of a table that this rank has."""
        ...

    def clear(self, slot: int) -> None: ...

    def replace(self, found: Tensor, ids: Tensor, slots: Tensor) -> None:
        """found [T, H]: rows whose slot [T] int32 has a table get its row of their id [T], in place, or zeros where
        another rank has that row."""
        ...


class RoutingRule(NamedTuple):
    """How the experts of a row are chosen by its router's logits.

    Scores are the softmax or the sigmoid of the logits. The `top_k` experts of the largest score are chosen; with a
    bias, those of the largest score plus bias; with groups of neighbours, from the best `top_groups` alone. A group is
    as good as its best expert, or, with a bias, as the sum of its two best."""

    num_experts: int
    top_k: int
    scoring: str = "softmax"  # or "sigmoid"
    renormalise: bool = False  # the chosen experts' scores are divided by their sum
    scale: float = 1.0  # of the weights
    num_groups: int = 1
    top_groups: int = 1


class Routes(NamedTuple):
    """The experts of each row and what their results are multiplied with, the best first."""

    experts: Tensor  # [T, k] int32
    weights: Tensor  # [T, k] float32


Router = Callable[[Tensor], Routes]  # logits [T, E] → routes


class ExpertWeights(NamedTuple):
    """The weights of one expert, or a rank's part of them: I inner features."""

    gate: StoredTensor  # [I, H]
    up: StoredTensor  # [I, H]
    down: StoredTensor  # [H, I]
    gate_up_bias: Tensor | None = None  # [2·I]
    down_bias: Tensor | None = None  # [H]


class ExpertGate(NamedTuple):
    """What is between the products of an expert: one of `Ops.gated_activation`, or "clamped_swiglu", in which gate and
    up are limited: gate · sigmoid(1.702 · gate) · (up + 1)."""

    kind: str = "silu"
    limit: float = 0.0  # of clamped_swiglu


class ExpertProducts(Protocol):
    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """x [T, H] → [T, H]: the sum over the experts of each row that are here, times their weights."""
        ...


class HeadProduct(Protocol):
    """A product of heads, of which each has its own weight: see Ops.make_head_product."""

    @property
    def weight(self) -> Tensor | None:
        """The weight [heads, in, out] in contiguous memory, for products in another order. None: it is kept in another
        form, or all products with it must be made by this object."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[T, heads, kept + in] → [T, heads, kept + out]"""
        ...


class Ops(Protocol):
    """T tokens, H hidden size. Nothing here synchronises with the device."""

    name: str
    defers_norms: bool  # layers leave the norms before products to `fuse`

    def for_encoders(self) -> Ops:
        """Returns the Ops for the layers of an encoder, whose sequences run whole: its products may be made by other
        kernels, the same for any number of rows, that are faster for many rows and round to 16 bits."""
        ...

    def find_format(self, stored: StoredTensor) -> WeightFormat | None:
        """How a weight is multiplied in its stored format. None: it must be converted to floats, for `make_linear`."""
        ...

    def quantize(self, stored: StoredTensor, use: WeightUse) -> StoredTensor:
        """The weight [out, in] in fewer bits, or as it is."""
        ...

    def note_on(self, stored: StoredTensor, use: WeightUse) -> str | None:
        """What the log should say about a weight, behind `quantize`: why it can't be kept in few bits, or that its
        numbers are unusable. None: nothing."""
        ...

    def kept_formats(self) -> list[dict[str, Any]]:
        """Lists, for display, in which formats other than floats weights are, and how they are multiplied (format,
        num_weights, num_bytes, product)."""
        ...

    def make_linear(self, weight: Tensor, bias: Tensor | None) -> Product:
        """Take over a weight [out, in] of floats, converted to the fastest layout."""
        ...

    def join(self, products: Sequence[Product]) -> Product:
        """Products of this Ops over the same input as one: their results side by side."""
        ...

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
        """The adapters of so many slots, up to this rank, beside a product of so many inputs, whose columns are those
        of parts with these numbers of outputs. No memory is taken for their matrices yet. `takes_weights`: adapters may
        have whole weights, too."""
        ...

    def join_low_rank(
        self, product: Product, num_outputs: Sequence[int], num_slots: int, max_rank: int
    ) -> JoinedProducts | None:
        """A product of this Ops and the adapters beside it as one, with memory for the matrices of all slots. None:
        they are computed apart."""
        ...

    def make_saved_tables(self, num_slots: int, rows: range, device: torch.device, dtype: torch.dtype) -> SavedTables:
        """Tables of adapters beside that of the vocabulary, of which this rank has these rows."""
        ...

    def make_gated_mlp(self, gate_up: Product, down: Product) -> Product:
        """down(silu_and_mul(gate_up(x))), as one call where the products allow it."""
        ...

    def make_router(self, rule: RoutingRule, bias: Tensor | None, counts: Tensor | None = None) -> Router:
        """How rows are sent to experts. `bias` [E] float32: for the choice. `counts` [E] int64: goes up by the rows of
        each expert, padding of a step among them."""
        ...

    def make_experts(self, experts: Iterable[ExpertWeights], own: range, gate: ExpertGate) -> ExpertProducts:
        """Takes over the weights of the experts `own` of all; other ranks have the others. They are read one after the
        other."""
        ...

    def make_head_product(self, weight: Tensor, kept: int = 0) -> HeadProduct:
        """Takes over a weight [heads, out, in] of floats: each head is multiplied with its own. The first `kept`
        numbers of a head are put in front of its product. Rows of the input may be a view of wider ones."""
        ...

    def add_gated(self, y: Tensor, x: Tensor, gates: Tensor) -> Tensor:
        """y [T, H] += sigmoid(gates [T, 1]) · x, in place; returns y."""
        ...

    def fuse(self, product: Product) -> FusedProduct | None:
        """A product of this Ops, also of `make_gated_mlp`, with its neighbours. None: they are called by themselves,
        and the norm after it adds the product to the residual stream."""
        ...

    def fuse_activation(self, product: Product, kind: str) -> Product | None:
        """A product of this Ops and the activation of its result as one call. None: they are called one after the
        other."""
        ...

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        """[V, H], [T] → [T, H]."""
        ...

    def cut_embedding(self, lookup: Lookup, table: StoredTensor, rows: range, vocab_size: int) -> Lookup:
        """Makes a lookup by ids of the whole vocabulary from one in a rank's part of the table, which has these rows.
        The rows of ids that other ranks have are zeros."""
        ...

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x [T, H] times the factor, in place."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x [T, H] += y, in place; returns x."""
        ...

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap · tanh(x / cap) of x [T, V], in place."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm of 16-bit numbers is rounded before the weight is applied, unless that is in float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x, in place; returns the norm of the sum."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...

    def add_layer_norm(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """residual += x, in place; returns the norm of the sum."""
        ...

    def head_rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Normalises in place over the last dimension of x [T, heads, head_dim]; x may be a strided view. The weight is
        [head_dim], or [heads, head_dim] where each head has its own."""
        ...

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, axes: Tensor | None = None) -> None:
        """Rotate q [T, heads, head_dim] and k [T, kv_heads, head_dim] in place (strided views are allowed).

        cos_sin [max_position, rotary_dim]: row p holds rotary_dim/2 cosines, then as many sines. The first rotary_dim
        of each head are rotated, as two halves (not interleaved); the rest is unchanged.
        positions [T], or, with `axes` [rotary_dim/2] int32, [number of axes, T]: pair i turns by the position on the
        axis axes[i].
        """
        ...

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """[T, 2·I] → [T, I]: silu of the first half times the second."""
        ...

    def gated_activation(self, x: Tensor, kind: str) -> Tensor:
        """[T, 2·I] → [T, I]: the activation of the first half, of any kind, times the second."""
        ...

    def clamped_swiglu(self, x: Tensor, limit: float) -> Tensor:
        """[T, 2·I] → [T, I], as ExpertGate says."""
        ...

    def activation(self, x: Tensor, kind: str) -> Tensor:
        """Elementwise: "silu", "relu", "gelu" (exact), "gelu_new" / "gelu_pytorch_tanh" (tanh form),
        "quick_gelu" (sigmoid form)."""
        ...
