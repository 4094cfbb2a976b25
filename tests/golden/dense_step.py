"""A step of one sequence with dense causal attention: the plainest possible StepContext, without pages or backends."""

from __future__ import annotations

import torch
from torch.nn import functional

from ratoon.layers.adapters import AdapterRows
from ratoon.layers.attention import (
    AttentionLayer,
    HeadTransform,
    LatentAttentionLayer,
    LatentProducts,
    StateSpaceLayer,
)
from ratoon.models.base import LanguageModel

Tensor = torch.Tensor


class DenseStep:
    """Keeps every key and value that it was given, so that calls after the first go on where the last one ended."""

    def __init__(self, adapters: AdapterRows | None = None) -> None:
        self.adapters = adapters
        self.keys: dict[int, Tensor] = {}  # layer index → [S, kv_heads, head_dim]
        self.values: dict[int, Tensor] = {}
        self.states: dict[int, tuple[Tensor, Tensor]] = {}  # [heads, head_dim, state_size], [width - 1, channels]

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform | None) -> Tensor:
        if transform is not None:
            transform.apply(q, k)
        assert q.shape[1:] == (layer.num_heads, layer.head_dim)
        assert k.shape[1:] == (layer.num_kv_heads, layer.head_dim)
        assert v.shape[1:] == (layer.num_kv_heads, layer.value_dim)
        keys = self.keys[layer.index] = _grown(self.keys.get(layer.index), k)
        values = self.values[layer.index] = _grown(self.values.get(layer.index), v)
        num_queries, num_keys = len(q), len(keys)
        query_positions = torch.arange(num_keys - num_queries, num_keys)[:, None]  # [T, 1]
        key_positions = torch.arange(num_keys)[None, :]  # [1, S]
        visible = key_positions <= query_positions  # [T, S]
        if layer.window is not None:
            visible &= key_positions > query_positions - layer.window
        repeats = layer.num_heads // layer.num_kv_heads
        keys = keys.repeat_interleave(repeats, dim=1)  # [S, heads, head_dim]
        values = values.repeat_interleave(repeats, dim=1)
        scores = torch.einsum("thd,shd->hts", q, keys) * layer.scale
        if layer.soft_cap is not None:
            scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
        scores = scores.masked_fill(~visible, float("-inf"))
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks[:, None, None].expand(-1, num_queries, 1)), -1)
        weights = scores.softmax(dim=-1)[..., :num_keys]
        return torch.einsum("hts,shd->thd", weights, values).flatten(1)  # [T, heads · head_dim]

    def attend_latent(
        self,
        layer: LatentAttentionLayer,
        queries: Tensor,
        k: Tensor,
        transform: HeadTransform | None,
        products: LatentProducts,
    ) -> Tensor:
        found = self.attend(layer, products.absorb(queries), k, k[..., layer.rope_dim :], transform)
        return products.values_of(found, layer.num_heads)

    def scan(self, layer: StateSpaceLayer, projected: Tensor) -> Tensor:
        """Token after token, as the recurrence is written."""
        sizes = (layer.inner_size, layer.num_channels, layer.num_heads)
        state, history = self.states.get(layer.index, (None, None))
        if state is None or history is None:
            state = torch.zeros(layer.num_heads, layer.head_dim, layer.state_size)
            history = torch.zeros(layer.conv_width - 1, layer.num_channels)
        found = []
        for row in projected:
            gate, inputs, times = row.split(sizes)
            history = torch.cat((history, inputs[None]))
            mixed = (history * layer.conv_weight.t()).sum(0)
            mixed = functional.silu(mixed if layer.conv_bias is None else mixed + layer.conv_bias)
            history = history[1:]
            times = functional.softplus(times + layer.time_step_bias).clamp(*layer.time_step_limit)
            x = mixed[: layer.inner_size].view(layer.num_heads, layer.head_dim)
            repeats = layer.num_heads // layer.num_groups
            written, read = mixed[layer.inner_size :].view(2, layer.num_groups, -1).repeat_interleave(repeats, 1)
            kept = (times * layer.decay).exp()[:, None, None]
            state = state * kept + (x * times[:, None])[:, :, None] * written[:, None]
            y = (state * read[:, None]).sum(-1) + x * layer.skip[:, None]
            found.append(y.flatten() * functional.silu(gate))
        self.states[layer.index] = state, history
        return torch.stack(found)

    def reading(self, rows: Tensor) -> None:
        """Rows that are read are selected behind attention."""


def _grown(stored: Tensor | None, new: Tensor) -> Tensor:
    return new.clone() if stored is None else torch.cat([stored, new])


@torch.inference_mode()
def dense_logits(model: LanguageModel, token_ids: list[int], chunks: list[int] | None = None) -> Tensor:
    """Logits [T, V] of all positions, computed in one pass or in chunks of the given lengths."""
    step = DenseStep()
    ids = torch.tensor(token_ids)
    parts, start = [], 0
    for length in chunks or [len(token_ids)]:
        positions = torch.arange(start, start + length)
        parts.append(model.compute_logits(model.forward(ids[positions], positions, step).normed))
        start += length
    assert start == len(token_ids)
    return torch.cat(parts)
