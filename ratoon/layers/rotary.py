"""Rotary position embedding: the table of angles, computed once per model, and the layer that applies it.

The table is a pure function of the config. It follows the arithmetic of `transformers` step by step in float32, because
at position 100,000 the last bit of a frequency is a visible angle.

Dynamic scaling stretches the frequencies with the length that a sequence has reached. Cached keys can't be rotated
again and are shared by sequences of any length, so here an angle depends on its position only: row p has the
frequencies of a sequence of p + 1 tokens. Up to the original length that is exactly the unscaled table. Beyond it, it
is what decoding token by token computes in `transformers`, but not what it computes for a prompt that is longer than
the original length at once (there all positions get the frequencies of the whole prompt).

Longrope has two sets of frequencies, for sequences within the original length and for longer ones. For the same reason
one of them is used for all sequences, chosen by max_model_len.
"""

from __future__ import annotations

import math

import torch

from ratoon.core.config import ModelConfig, RopeScaling
from ratoon.core.errors import ModelError
from ratoon.layers.weights import Weights

Tensor = torch.Tensor


class Rotary:
    """Rotates q [T, heads, head_dim] and k [T, kv_heads, head_dim] in place. One for all layers of a model.

    A model whose rotation has sections (M-RoPE: time, height, width) has positions on several axes, [axes, T], and each
    pair of a head turns by the one of its section. Otherwise positions are [T]; so they are for tokens whose positions
    are the same on all axes, which cost what those of a model without sections do.
    """

    __slots__ = ("axes", "cos_sin", "rotate")

    def __init__(self, weights: Weights, config: ModelConfig, max_position: int) -> None:
        self.rotate = weights.ops.rotary
        self.axes: Tensor | None = None  # [rotary_dim / 2] int32: the axis of each pair
        if config.rope_scaling.sections:
            self.axes = axes_of_pairs(config).to(weights.device)
        if weights.device.type == "meta":
            check_scaling(config)
            self.cos_sin = torch.empty(max_position, rotary_dim_of(config), device="meta")
        else:
            self.cos_sin = cos_sin_table(config, max_position).to(weights.device)

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> None:
        self.rotate(q, k, positions, self.cos_sin, self.axes if positions.dim() > 1 else None)


def axes_of_pairs(config: ModelConfig) -> Tensor:
    """[rotary_dim / 2] int32: section after section. Raises ModelError if they don't add up to the pairs of a head."""
    sections, num_pairs = config.rope_scaling.sections, rotary_dim_of(config) // 2
    if sum(sections) != num_pairs:
        problem = f"the sections of its rotation are {list(sections)}, {sum(sections)} pairs of a head"
        raise ModelError(config.architecture, problem, f"{num_pairs} pairs in all")
    return torch.repeat_interleave(torch.arange(len(sections), dtype=torch.int32), torch.tensor(sections))


def rotary_dim_of(config: ModelConfig) -> int:
    return config.head_dim if config.rotary_dim is None else config.rotary_dim


def check_scaling(config: ModelConfig) -> None:
    kinds = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
    if config.rope_scaling.kind not in kinds:
        problem = f"rope scaling {config.rope_scaling.kind!r} is unknown"
        raise ModelError(config.architecture, problem, f"known: {', '.join(kinds)}")


def cos_sin_table(config: ModelConfig, max_position: int) -> Tensor:
    """[max_position, rotary_dim] in float32: row p holds rotary_dim/2 cosines, then as many sines."""
    check_scaling(config)
    scaling, dim, theta = config.rope_scaling, rotary_dim_of(config), config.rope_theta
    original_max = _original_length(config)
    positions = torch.arange(max_position, dtype=torch.float32)
    amplitude = 1.0
    if scaling.kind == "llama3":
        frequencies = _llama3_frequencies(dim, theta, scaling, original_max)
    elif scaling.kind == "yarn":
        frequencies = _yarn_frequencies(dim, theta, scaling, original_max)
        amplitude = _yarn_amplitude(scaling)
    elif scaling.kind == "longrope":
        factors = scaling.long_factors if uses_long_factors(config, max_position) else scaling.short_factors
        frequencies = 1.0 / (torch.tensor(factors) * theta ** _exponents(dim))
        amplitude = _longrope_amplitude(scaling, original_max)
    elif scaling.kind == "dynamic":
        frequencies = _dynamic_frequencies(dim, theta, scaling.factor, original_max, max_position)
    elif scaling.kind == "linear":
        frequencies = _plain_frequencies(dim, theta) / scaling.factor
    else:
        frequencies = _plain_frequencies(dim, theta)
    angles = positions[:, None] * frequencies  # [P, 1] · [dim/2] (dynamic: [P, dim/2]) → [P, dim/2]
    table = torch.empty(max_position, dim)
    torch.cos(angles, out=table[:, : dim // 2])
    torch.sin(angles, out=table[:, dim // 2 :])
    return table if amplitude == 1.0 else table.mul_(amplitude)


def uses_long_factors(config: ModelConfig, max_position: int) -> bool:
    """Which of the two sets of frequencies of longrope all sequences have."""
    return max_position > _original_length(config)


def _original_length(config: ModelConfig) -> int:
    return config.rope_scaling.original_max_position or config.max_position


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim  # [dim/2]


def _plain_frequencies(dim: int, theta: float) -> Tensor:
    return 1.0 / theta ** _exponents(dim)


def _dynamic_frequencies(dim: int, theta: float, factor: float, original_max: int, max_position: int) -> Tensor:
    """[dim/2], or [max_position, dim/2] when there are positions beyond the original length, each with its own base."""
    plain = _plain_frequencies(dim, theta)
    if max_position <= original_max:
        return plain
    lengths = torch.arange(original_max + 1, max_position + 1)  # of the sequence, when a position beyond is its last
    stretch = factor * lengths / original_max - (factor - 1)
    bases = theta * stretch ** (dim / (dim - 2))
    beyond = 1.0 / bases[:, None] ** _exponents(dim)
    return torch.cat([plain.expand(original_max, -1), beyond])


def _llama3_frequencies(dim: int, theta: float, scaling: RopeScaling, original_max: int) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, and those in between are a mixture."""
    plain = _plain_frequencies(dim, theta)
    wavelengths = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = (original_max / wavelengths - low) / (high - low)
    mixed = (1 - kept_share) * plain / scaling.factor + kept_share * plain
    is_long = wavelengths > original_max / low
    is_short = wavelengths < original_max / high
    return torch.where(is_long, plain / scaling.factor, torch.where(is_short, plain, mixed))


def _yarn_frequencies(dim: int, theta: float, scaling: RopeScaling, original_max: int) -> Tensor:
    """Kept for dimensions that rotate often within the original length, stretched for slow ones, a ramp between."""

    def dimension_that_turns(times: float) -> float:
        return dim * math.log(original_max / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension_that_turns(scaling.beta_fast), dimension_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept_share = 1 - ramp
    powers = theta ** _exponents(dim)
    return 1.0 / (scaling.factor * powers) * (1 - kept_share) + 1.0 / powers * kept_share


def _yarn_amplitude(scaling: RopeScaling) -> float:
    """Cosines and sines are scaled, which scales the attention logits by its square."""

    def by_factor(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return by_factor(scaling.mscale) / by_factor(scaling.mscale_all_dim)
    return by_factor(1.0)


def _longrope_amplitude(scaling: RopeScaling, original_max: int) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 1.0 if scaling.factor <= 1 else math.sqrt(1 + math.log(scaling.factor) / math.log(original_max))
