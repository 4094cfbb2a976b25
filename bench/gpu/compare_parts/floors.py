"""The least time that a workload can take on a device: bytes that it must read, and products that it must compute.
Arithmetic over a config.json alone.

A step reads all matrices once, and the keys and values of every token before the new ones; it multiplies each new token
with every matrix. The larger of the two times is its floor. Launches, elementwise work and writes are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES_PER_SECOND = 4.39e12  # reads of an H200's memory, as measured
OPERATIONS_PER_SECOND = 790e12  # a bf16 product of 8192³ there, as measured
# A config with one of these describes a model whose steps read less than all weights or all keys and values.
OTHER_FORMS = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "sliding_window")


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped heads and a gated MLP."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def read(cls, folder: Path) -> Shape:
        fields: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(
            fields["hidden_size"],
            fields["intermediate_size"],
            fields["num_hidden_layers"],
            fields["num_attention_heads"],
            fields["num_key_value_heads"],
            fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
            fields["vocab_size"],
        )

    @staticmethod
    def describes(folder: Path) -> bool:
        """Whether the arithmetic here holds for the model: it has no experts, windows, latent keys or states."""
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return all(fields.get(name) is None for name in OTHER_FORMS)

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers."""
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.hidden_size
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def numbers_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Precision:
    """Bytes of a number as stored."""

    weight: int = 2
    kv: int = 2


@dataclass(frozen=True)
class Step:
    """What one step computes: new tokens, and for each how many tokens it attends to, itself included."""

    num_tokens: int
    num_attended: float  # pairs of a new token and one that it attends to
    num_read: float  # tokens whose keys and values are read: those that sequences share count once
    num_logits: int  # rows of the head

    def seconds(self, shape: Shape, precision: Precision) -> float:
        weights = shape.layer_weights + shape.head_weights
        num_bytes = weights * precision.weight + self.num_read * shape.numbers_per_token * precision.kv
        operations = 2 * (self.num_tokens * shape.layer_weights + self.num_logits * shape.head_weights)
        operations += 4 * self.num_attended * shape.num_layers * shape.num_heads * shape.head_dim
        return max(num_bytes / BYTES_PER_SECOND, operations / OPERATIONS_PER_SECOND)


def prefill(num_tokens: int, num_cached: int = 0, num_prompts: int = 1) -> Step:
    """New tokens of each prompt, behind cached ones. Keys and values of the new ones are not read from memory."""
    pairs = num_tokens * num_cached + num_tokens * (num_tokens + 1) / 2
    return Step(num_prompts * num_tokens, num_prompts * pairs, num_prompts * num_cached, num_prompts)


def decode(contexts: Sequence[float]) -> Step:
    """One token of each sequence, with so many tokens before it."""
    return Step(len(contexts), sum(contexts) + len(contexts), sum(contexts), len(contexts))


def throughput(lengths: Sequence[tuple[int, int]], shape: Shape, precision: Precision) -> float:
    """Output tokens a second, all sequences at once: a prefill of all prompts, then a decode step for each token of
    the longest answer."""
    seconds = sum(prefill(num_in).seconds(shape, Precision(0, 0)) for num_in, _ in lengths)
    longest = max(num_out for _, num_out in lengths)
    for step in range(1, longest):
        contexts = [num_in + step for num_in, num_out in lengths if num_out > step]
        seconds += decode(contexts).seconds(shape, precision)
    return sum(num_out for _, num_out in lengths) / seconds


def beam_search(
    num_prompts: int, before: int, width: int, num_tokens: int, shape: Shape, precision: Precision
) -> float:
    """Seconds: prefill of all prompts, and steps whose beams read their prompt once."""
    seconds = prefill(before, num_prompts=num_prompts).seconds(shape, precision)
    for step in range(1, num_tokens):
        rows = num_prompts * width
        own = rows * step
        seconds += Step(rows, rows * before + own, num_prompts * before + own, rows).seconds(shape, precision)
    return seconds
