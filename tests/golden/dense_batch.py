"""Forward passes over several sequences with dense attention for each: no pages, no backend, no padding.

For models with an encoder, whose three kinds of attention it has. dense_step.py is the plainer one, for one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer
from ratoon.models.base import LanguageModel
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

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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


class EveryState:
    """A StreamReader that takes all rows behind all layers: `states` [L + 2, T, H], as the engine numbers layers."""

    def __init__(self, num_rows: int) -> None:
        self.last_rows = list(range(num_rows))
        self.taken: list[Tensor] = []

    def take(self, layer: int, stream: Tensor, update: Tensor | None = None) -> None:
        assert layer == len(self.taken)
        self.taken.append(stream.clone() if update is None else stream + update)

    def take_end(self, stream: Tensor, normed: Tensor) -> None:
        self.taken += [stream.clone(), normed.clone()]

    @property
    def states(self) -> Tensor:
        return torch.stack(self.taken)


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
    step, reader = DensePass(memory, lengths), EveryState(sum(lengths))
    states = model.encode(batch, step, reader)
    assert torch.equal(states, reader.states[-1])
    model.store_cross(states, step)
    memory.own = [{} for _ in inputs]  # the encoder's own keys and values are of no use to the decoder
    return memory, list(reader.states.split(lengths, dim=1))


@torch.inference_mode()
def decode(model: LanguageModel, memory: DenseMemory, prompts: list[list[int]]) -> list[Tensor]:
    """All sequences in one pass: every state of each [L + 2, T, H]."""
    lengths = [len(tokens) for tokens in prompts]
    reader = EveryState(sum(lengths))
    ids = torch.tensor([token for tokens in prompts for token in tokens])
    model.forward_and_read(
        ids, positions_of(lengths), DensePass(memory, lengths), None, reader, model.config.num_layers
    )
    return list(reader.states.split(lengths, dim=1))
