"""Mixtures of experts by the kernels of native/experts.c: routes, and the products of the chosen experts in one call.

Weights are packed as those of other products are, in floats, in 16 bits or in the bits of their file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch

from ratoon.core.errors import ModelError
from ratoon.layers.native import ExpertLayer, ExpertWeight, RouteRule, library
from ratoon.layers.native.recording import new_bytes, new_floats
from ratoon.layers.ops import ExpertGate, Product, Routes, RoutingRule

Tensor = torch.Tensor

MOST_EXPERTS = 1024  # of kernels.h
SCORINGS = {"softmax": 0, "sigmoid": 1}
CLAMPED_SWIGLU = 5


class NativeRouter:
    """Logits [T, E] → routes."""

    __slots__ = ("_bias", "_counts", "_kernels", "_rule", "_structure")

    def __init__(self, rule: RoutingRule, bias: Tensor | None, counts: Tensor | None) -> None:
        kernels = library()
        assert kernels is not None
        if rule.num_experts > MOST_EXPERTS:
            raise ModelError("config", f"{rule.num_experts} experts are too many", f"at most {MOST_EXPERTS}")
        self._kernels, self._rule, self._counts = kernels, rule, counts
        self._bias = None if bias is None else bias.float().contiguous()
        self._structure = RouteRule(
            rule.num_experts, rule.top_k, SCORINGS[rule.scoring], rule.renormalise, rule.num_groups, rule.top_groups,
            None if self._bias is None else self._bias.data_ptr(), rule.scale,
        )  # fmt: skip

    def __call__(self, logits: Tensor) -> Routes:
        rows, top_k = logits.shape[0], self._rule.top_k
        weights = new_floats(rows, top_k)
        experts = new_floats(rows, top_k).view(torch.int32)
        self._kernels.ratoon_route(
            ctypes.addressof(self._structure), logits.data_ptr(), logits.stride(0), rows, experts.data_ptr(),
            weights.data_ptr(), None if self._counts is None else self._counts.data_ptr(),
        )  # fmt: skip
        return Routes(experts, weights)


class PackedExpert:
    """One product of an expert, in parts of which each has its own format."""

    def __init__(self, parts: Sequence[tuple[ExpertWeight, Product]], in_features: int, out_features: int) -> None:
        self.parts = parts
        self.in_features, self.out_features = in_features, out_features


class NativeExperts:
    """Implements ExpertProducts."""

    __slots__ = ("_arrays", "_kept", "_kernels", "_layer", "_measure", "_out_features")

    def __init__(
        self, experts: Iterable[tuple[PackedExpert, PackedExpert]], own: range, gate: ExpertGate, kinds: dict[str, int]
    ) -> None:
        """`experts`: gate and up, and down, of each; all have as many parts. `kinds`: the numbers of activations."""
        kernels = library()
        assert kernels is not None
        both = list(experts)
        assert len(both) == len(own)
        num_parts = len(both[0][0].parts)
        gate_up = [first.parts[part][0] for part in range(num_parts) for first, _ in both]
        down = [second.parts[0][0] for _, second in both]
        self._arrays = ((ExpertWeight * len(gate_up))(*gate_up), (ExpertWeight * len(down))(*down))
        self._kept = both  # whose memory the arrays point to
        inner, self._out_features = both[0][1].in_features, both[0][1].out_features
        self._layer = ExpertLayer(
            len(own), own.start, both[0][0].in_features, inner, self._out_features, num_parts,
            *(ctypes.addressof(array) for array in self._arrays),
            CLAMPED_SWIGLU if gate.kind == "clamped_swiglu" else kinds[gate.kind],
            any(weight.quantised for weight in (*gate_up, *down)), gate.limit,
        )  # fmt: skip
        self._kernels = kernels
        self._measure = kernels.functions["ratoon_experts_scratch"]  # which no recorded pass has to repeat

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        rows, top_k = routes.experts.shape
        layer = ctypes.addressof(self._layer)
        scratch = new_bytes(self._measure(layer, rows, top_k))
        y = new_floats(rows, self._out_features)
        failed = self._kernels.ratoon_experts(
            layer, x.data_ptr(), x.stride(0), rows, routes.experts.data_ptr(), routes.weights.data_ptr(), top_k,
            scratch.data_ptr(), y.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError("a kernel ran out of memory")
        return y
