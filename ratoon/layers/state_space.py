"""State-space layers (Mamba-2): the weights around the scan over states.

For each head there is a state of head_dim · state_size numbers. A token lets it decay, adds the product of its input
and of what it writes (B), and reads it with C. Before that, a convolution over the last tokens mixes inputs. The
layer as a step sees it is in attention.py; where states are kept, and how they are computed, are the runner's and the
backend's (attention/state_space.py).
"""

from __future__ import annotations

import torch

from ratoon.core.config import StateSpaceConfig
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.attention import StateSpaceLayer, StepContext
from ratoon.layers.linear import Linear, Piece, RowParallelLinear
from ratoon.layers.norm import LinearInput, WholeRMSNorm
from ratoon.layers.products import join_rows
from ratoon.layers.stored import TensorSlice
from ratoon.layers.weights import Weights

Tensor = torch.Tensor


class NormedOutput:
    """The norm over the heads of each group of a row, and the product behind it. It is called as a linear layer is."""

    __slots__ = ("linear", "norm")

    def __init__(self, norm: WholeRMSNorm, linear: Linear) -> None:
        self.norm, self.linear = norm, linear

    def __call__(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        self.norm(x[:, None])
        return self.linear(x, adapters)

    def add_to(self, stream: Tensor, x: Tensor, adapters: AdapterRows | None = None) -> Tensor | None:
        self.norm(x[:, None])
        return self.linear.add_to(stream, x, adapters)


class StateSpaceMixer:
    """The weights of a state-space layer, and what is around its scan: the product before it, the norm and the product
    behind it. It takes the place of SelfAttention. A rank has some of the heads, and the groups that these belong
    to."""

    __slots__ = ("input", "layer", "output")

    def __init__(
        self, weights: Weights, index: int, config: StateSpaceConfig, hidden_size: int, norm_eps: float
    ) -> None:
        shard = weights.shard
        heads, groups = shard.cut_heads(config.num_heads, config.num_groups)
        head_dim, state_size, width = config.head_dim, config.state_size, config.conv_width
        inner, of_groups = config.num_heads * head_dim, config.num_groups * state_size
        own_inner = range(heads.start * head_dim, heads.stop * head_dim)
        own_groups = range(groups.start * state_size, groups.stop * state_size)

        # The channels of the convolution, and the outputs of the first product: gate, channels, time steps of heads
        channels = [own_inner, _behind(inner, own_groups), _behind(inner + of_groups, own_groups)]
        num_channels = inner + 2 * of_groups
        outputs = [own_inner, *(_behind(inner, part) for part in channels), _behind(inner + num_channels, heads)]
        total = inner + num_channels + config.num_heads
        if shard.world_size == 1:
            channels, outputs = [range(num_channels)], [range(total)]
        self.input = Linear([Piece(weights / "in_proj", total, config.proj_bias, outputs)], hidden_size)

        def take(name: str, *shape: int, parts: list[range]) -> Tensor:
            cuts = [TensorSlice.of_range(0, part, shape[0]) for part in parts]
            return join_rows([weights.take(name, *shape, part=cut, dtype=torch.float32) for cut in cuts])

        decay = take("A_log", config.num_heads, parts=[heads])
        self.layer = StateSpaceLayer(
            index,
            len(heads),
            head_dim,
            state_size,
            len(groups),
            config.time_step_limit,
            take("conv1d.weight", num_channels, 1, width, parts=channels)[:, 0].t().contiguous().t(),
            take("conv1d.bias", num_channels, parts=channels) if config.conv_bias else None,
            decay if decay.is_meta else -decay.exp(),
            take("D", config.num_heads, parts=[heads]),
            take("dt_bias", config.num_heads, parts=[heads]),
        )
        norm = WholeRMSNorm(weights / "norm", inner, own_inner, norm_eps, config.num_groups)
        self.output = NormedOutput(norm, RowParallelLinear(weights / "out_proj", inner, hidden_size, config.proj_bias))

    def __call__(self, x: LinearInput, positions: Tensor, step: StepContext) -> Tensor:
        """[T, H] → [T, inner], or of the rows that are read alone: the input of `output`."""
        return self.layer(self.input(x, step.adapters), step)


def _behind(offset: int, part: range) -> range:
    return range(offset + part.start, offset + part.stop)
