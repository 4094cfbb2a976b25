"""The backend of state-space layers in plain torch, on any device: the reference for other ones.

A page is what a sequence needs to go on behind a token: the states of all heads, and the last inputs of the
convolution. A step reads the page of the token before its first one, and writes the pages of the block ends that it
passes and of its last token. Steps with one token of each request are one batch; others go through request after
request, and through each in chunks that are products of matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from ratoon.attention.interface import (
    AttentionNeeds,
    CommonAttentionMetadata,
    LayerCache,
    StateBackend,
)
from ratoon.layers.attention import StateSpaceLayer

Tensor = torch.Tensor

CHUNK = 64  # tokens that are computed at once, with a matrix of as many times as many numbers for each head


@dataclass(slots=True)
class ScanMetadata:
    inputs: CommonAttentionMetadata
    starts: list[int]  # query_start_loc
    seq_lens: list[int]
    # [T] to which the state behind each token goes, if any; the null block: nowhere. Empty: each request has one token
    pages: list[int]


class TorchStateBackend(StateBackend):
    name = "torch states"

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        reasons = cls.reasons_of_content(needs)
        if needs.batch_invariant:
            reasons.append("the order of its sums depends on the batch")
        return reasons

    def build_metadata(self, inputs: CommonAttentionMetadata) -> ScanMetadata:
        is_single = inputs.max_query_len == 1 and len(inputs.slot_mapping) == len(inputs.seq_lens)
        pages = [] if is_single else (inputs.slot_mapping // inputs.block_size).tolist()
        return ScanMetadata(inputs, inputs.query_start_loc.tolist(), inputs.seq_lens.tolist(), pages)

    def scan(self, layer: StateSpaceLayer, projected: Tensor, kv_cache: LayerCache, metadata: ScanMetadata) -> Tensor:
        gate, inputs, time_steps = split(layer, projected)
        if not metadata.pages:
            y = _scan_single(layer, inputs, time_steps, kv_cache, metadata.inputs)
        else:
            y = _scan_each(layer, inputs, time_steps, kv_cache, metadata)
        return (y.flatten(1) * functional.silu(gate.float())).to(projected.dtype)


def split(layer: StateSpaceLayer, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[T, …] → the gate [T, inner]; the convolution's inputs [T, channels], and time steps [T, heads], in float32."""
    gate, inputs, time_steps = projected.split((layer.inner_size, layer.num_channels, layer.num_heads), -1)
    steps = functional.softplus(time_steps.float() + layer.time_step_bias)
    return gate, inputs.float(), steps.clamp(*layer.time_step_limit)


def convolve(layer: StateSpaceLayer, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[…, width - 1 + n, channels] → of the last n: x […, n, heads, head_dim], B and C […, n, groups, state_size]."""
    width = layer.conv_width
    windows = inputs.unfold(-2, width, 1)  # […, n, channels, width]
    mixed = torch.einsum("...cw,cw->...c", windows, layer.conv_weight)
    mixed = functional.silu(mixed if layer.conv_bias is None else mixed + layer.conv_bias)
    of_groups = layer.num_groups * layer.state_size
    x, written, read = mixed.split((layer.inner_size, of_groups, of_groups), -1)
    shape = layer.num_groups, layer.state_size
    return x.unflatten(-1, (layer.num_heads, layer.head_dim)), written.unflatten(-1, shape), read.unflatten(-1, shape)


def scan_chunk(
    layer: StateSpaceLayer, x: Tensor, written: Tensor, read: Tensor, time_steps: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """x [n, heads, head_dim], B and C [n, groups, state_size], [n, heads], a state [heads, head_dim, state_size] →
    [n, heads, head_dim], and the state behind the last token."""
    count, group = len(x), layer.num_heads // layer.num_groups
    written, read = (part.repeat_interleave(group, dim=1) for part in (written, read))  # [n, heads, state_size]
    logs = (time_steps * layer.decay).t()  # [heads, n]
    # How much is left at l of what was written at s: the sum of logs behind s up to l, added up in that order, because
    # the difference of two long sums would have lost its last digits.
    behind = torch.ones(count, count, dtype=torch.bool, device=x.device).tril(-1)
    sums = logs[:, :, None].expand(-1, -1, count).masked_fill(~behind, 0.0).cumsum(1)
    kept = sums.masked_fill(~(behind | torch.eye(count, dtype=torch.bool, device=x.device)), -torch.inf).exp()
    since = logs.cumsum(1).exp()  # [heads, n]: of the state before the first token
    scaled = x * time_steps[..., None]
    scores = torch.einsum("lhn,shn->hls", read, written) * kept
    y = torch.einsum("hls,shp->lhp", scores, scaled)
    y += torch.einsum("lhn,hpn,hl->lhp", read, state, since)
    y += x * layer.skip[:, None]
    state = state * since[:, -1, None, None] + torch.einsum("hs,shp,shn->hpn", kept[:, -1], scaled, written)
    return y, state


def _scan_each(
    layer: StateSpaceLayer, inputs: Tensor, time_steps: Tensor, kv_cache: LayerCache, metadata: ScanMetadata
) -> Tensor:
    states, histories = kv_cache
    block_size, tables = metadata.inputs.block_size, metadata.inputs.block_table_device
    y = inputs.new_empty(len(inputs), layer.num_heads, layer.head_dim)
    num_before = layer.conv_width - 1
    for row, seq_len in enumerate(metadata.seq_lens):
        start, end = metadata.starts[row], metadata.starts[row + 1]
        if start == end:
            continue
        position = before = seq_len - (end - start)
        if position:
            page = tables[row, (position - 1) // block_size].long()
            state, history = states[page], histories[page]
        else:
            state, history = torch.zeros_like(states[0]), torch.zeros_like(histories[0])
        rows = torch.cat((history, inputs[start:end]))  # [width - 1 + n, channels]
        x, written, read = convolve(layer, rows)
        first = 0
        while first < end - start:
            # Up to the end of a block, whose state is kept
            last = min(end - start, first + CHUNK, (position // block_size + 1) * block_size - before)
            part = slice(first, last)
            steps = time_steps[start + first : start + last]
            y[start + first : start + last], state = scan_chunk(layer, x[part], written[part], read[part], steps, state)
            position += last - first
            first = last
            if first == end - start or position % block_size == 0:
                target = metadata.pages[start + first - 1]
                states[target], histories[target] = state, rows[first : first + num_before]
    return y


def _scan_single(
    layer: StateSpaceLayer, inputs: Tensor, time_steps: Tensor, kv_cache: LayerCache, step: CommonAttentionMetadata
) -> Tensor:
    """One token of each request."""
    states, histories = kv_cache
    before = step.seq_lens_device.long() - 1  # [R] tokens
    columns = (before - 1).clamp(min=0) // step.block_size
    pages = step.block_table_device.gather(1, columns[:, None])[:, 0].long()
    begins = (before <= 0)[:, None, None]
    rows = torch.cat((histories[pages].masked_fill(begins, 0.0), inputs[:, None]), 1)  # [R, width, channels]
    x, written, read = (part[:, 0] for part in convolve(layer, rows))
    group = layer.num_heads // layer.num_groups
    written, read = (part.repeat_interleave(group, dim=1) for part in (written, read))  # [R, heads, state_size]
    kept = (time_steps * layer.decay).exp()[..., None, None]
    added = torch.einsum("rhp,rhn->rhpn", x * time_steps[..., None], written)
    state = states[pages].masked_fill(begins[..., None], 0.0) * kept + added
    targets = step.slot_mapping // step.block_size
    states[targets], histories[targets] = state, rows[:, 1:]
    return torch.einsum("rhpn,rhn->rhp", state, read) + x * layer.skip[:, None]
