"""The low-rank part that an adapter adds to one layer, as its file declares it."""

from __future__ import annotations

from typing import NamedTuple

from ratoon.core.errors import ModelError


class LowRankPart(NamedTuple):
    """`scale` · b · a is added to the layer's weight [out, in]."""

    num_inputs: int
    num_outputs: int
    rank: int
    scale: float
    may_be_transposed: bool = False  # the model's files may have the weight as [in, out]

    @classmethod
    def of_shapes(
        cls,
        source: str,
        layer: str,
        a: tuple[int, ...],
        b: tuple[int, ...],
        scale_of_rank_1: float,
        is_rank_stable: bool,
    ) -> LowRankPart:
        """a [rank, in], b [out, rank]. Raises ModelError for other shapes."""
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or min(*a, *b) < 1:
            raise ModelError(source, f"has matrices of shapes {a} and {b} for {layer!r}", "(rank, in) and (out, rank)")
        rank = a[0]
        return cls(a[1], b[0], rank, scale_of_rank_1 / (rank**0.5 if is_rank_stable else rank))

    def compare(self, source: str, layer: str, shape: tuple[int, ...]) -> None:
        """Raises ModelError if the model's layer has another shape."""
        own = (self.num_outputs, self.num_inputs)
        if own != shape and not (self.may_be_transposed and own == shape[::-1]):
            problem = f"has a product of shape {own} for {layer!r}, and the model's layer has the shape {shape}"
            raise ModelError(source, problem, "an adapter that was trained on this model")
