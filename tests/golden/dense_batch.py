"""Forward passes over several sequences with dense attention for each: no pages, no backend, no padding.

For models with an encoder, whose three kinds of attention it has. dense_step.py is the plainer one, for one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer, HeadTransform
from ratoon.models.base import FinalStates, LanguageModel, StreamObserver
from ratoon.models.encoder_decoder import EncoderBatch, EncoderDecoderLM

Tensor = torch.Tensor
KeysAndValues = dict[int, tuple[Tensor, Tensor]]  # layer index → keys and values, [S, heads, head_dim] each


class DenseMemory:
    """What sequences leave for later passes."""

    def __init__(self, count: int) -> None:
        self.own: list[KeysAndValues] = [{} for _ in range(count)]
        self.of_encoder: list[KeysAndValues] = [{} for _ in range(count)]


class DensePass:
    """A StepContext: rows of all sequences, one behind the other, so and so many of each."""

    adapters = None

    def __init__(self, memory: DenseMemory, lengths: Sequence[int]) -> None:
        self.memory = memory
        self.lengths = list(lengths)

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform | None) -> Tensor:
        if transform is not None:
            transform.apply(q, k)
        assert q.shape[1:] == (layer.num_heads, layer.head_dim)
        assert k.shape[1:] == v.shape[1:] == (layer.num_kv_heads, layer.head_dim)
        attended = []
        for stored, *rows in zip(self.memory.own, *(tensor.split(self.lengths) for tensor in (q, k, v)), strict=True):
            queries, keys, values = rows
            if layer.index in stored:
                keys, values = (torch.cat(pair) for pair in zip(stored[layer.index], (keys, values), strict=True))
            stored[layer.index] = keys.clone(), values.clone()
            attended.append(attend(queries, keys, values, layer.scale, _score_bias(layer, len(queries), len(keys))))
        return torch.cat(attended)

    def reading(self, rows: Tensor) -> None:
        """Rows that are read are selected behind attention."""

    def attend_across(self, layer: CrossAttentionLayer, q: Tensor) -> Tensor:
        assert q.shape[1:] == (layer.num_heads, layer.head_dim)
        parts = zip(self.memory.of_encoder, q.split(self.lengths), strict=True)
        return torch.cat([attend(rows, *stored[layer.index], layer.scale, None) for stored, rows in parts])

    def store_across(self, layer: CrossAttentionLayer, k: Tensor, v: Tensor) -> None:
        assert k.shape[1:] == v.shape[1:] == (layer.num_heads, layer.head_dim)
        for stored, *both in zip(self.memory.of_encoder, k.split(self.lengths), v.split(self.lengths), strict=True):
            stored[layer.index] = both[0].clone(), both[1].clone()


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """[T, heads, head_dim], twice [S, heads, head_dim], [heads or 1, T, S] → [T, heads · head_dim]."""
    scores = torch.einsum("thd,shd->hts", q.float(), keys.float()) * scale
    if bias is not None:
        scores = scores + bias
    return torch.einsum("hts,shd->thd", scores.softmax(dim=-1), values.float()).flatten(1).to(q.dtype)


def _score_bias(layer: AttentionLayer, num_queries: int, num_keys: int) -> Tensor:
    """[heads or 1, T, S]: minus infinity where a query may not look, and the layer's own bias."""
    query_positions = torch.arange(num_keys - num_queries, num_keys)[:, None]
    distances = torch.arange(num_keys)[None, :] - query_positions  # [T, S]
    hidden = (distances > 0) if layer.causal else torch.zeros_like(distances, dtype=torch.bool)
    bias = torch.zeros(1, num_queries, num_keys).masked_fill(hidden, float("-inf"))
    if layer.bias is None:
        return bias
    reach = layer.bias.shape[1] // 2
    return bias + layer.bias[:, distances + reach]


class EveryState(StreamObserver):
    """Takes all rows after each layer but the last."""

    def __init__(self) -> None:
        self.taken: list[Tensor] = []

    def observe(self, layer: int, stream: Tensor, update: Tensor | None) -> None:
        assert layer == len(self.taken)
        self.taken.append(stream.clone() if update is None else stream + update)

    def states(self, final: FinalStates) -> Tensor:
        """[L + 2, T, H], as the engine numbers layers."""
        return torch.stack([*self.taken, final.stream, final.normed])


def positions_of(lengths: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


@torch.inference_mode()
def encode(model: EncoderDecoderLM, inputs: list[list[int]] | list[Tensor]) -> tuple[DenseMemory, list[Tensor]]:
    """Run the encoder once over all inputs. What the decoder needs, and every state of each input [L + 2, E, H]."""
    memory = DenseMemory(len(inputs))
    if isinstance(inputs[0], Tensor):
        lengths = [model.encoder_config.max_position] * len(inputs)
        batch = EncoderBatch(positions_of(lengths), features=torch.stack(inputs))
    else:
        lengths = [len(tokens) for tokens in inputs]
        flat = [token for tokens in inputs for token in tokens]
        batch = EncoderBatch(positions_of(lengths), input_ids=torch.tensor(flat))
    step, observer = DensePass(memory, lengths), EveryState()
    final = model.encode(batch, step, [observer])
    model.store_cross(final.normed, step)
    memory.own = [{} for _ in inputs]  # the encoder's own keys and values are of no use to the decoder
    return memory, list(observer.states(final).split(lengths, dim=1))


@torch.inference_mode()
def decode(model: LanguageModel, memory: DenseMemory, prompts: list[list[int]]) -> list[Tensor]:
    """All sequences in one pass: every state of each [L + 2, T, H]."""
    lengths = [len(tokens) for tokens in prompts]
    observer = EveryState()
    ids = torch.tensor([token for tokens in prompts for token in tokens])
    final = model.forward(ids, positions_of(lengths), DensePass(memory, lengths), observers=[observer])
    return list(observer.states(final).split(lengths, dim=1))
