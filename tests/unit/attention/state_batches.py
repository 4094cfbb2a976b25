"""Sequences of a state-space layer in paged memory, and the recurrence written out in float64: what backends are
compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ratoon.attention.interface import AttentionBackend, AttentionNeeds, CommonAttentionMetadata, LayerCache
from ratoon.core.kv import StateSpec
from ratoon.layers.attention import StateSpaceLayer

Tensor = torch.Tensor

UNIT = 2.0**-24  # of rounding


def make_layer(
    heads: int, head_dim: int, state_size: int, groups: int = 1, width: int = 4, has_bias: bool = True, seed: int = 0,
    limit: tuple[float, float] = (0.0, float("inf")), device: str = "cpu",
) -> StateSpaceLayer:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    channels = heads * head_dim + 2 * groups * state_size
    return StateSpaceLayer(
        0, heads, head_dim, state_size, groups, limit,
        (torch.randn(width, channels, generator=generator) * 0.5).to(device).t(),
        (torch.randn(channels, generator=generator) * 0.2).to(device) if has_bias else None,
        -(torch.rand(heads, generator=generator) * 2 + 0.1).to(device),
        torch.randn(heads, generator=generator).to(device),
        (torch.randn(heads, generator=generator) - 1).to(device),
    )  # fmt: skip


def needs_of(
    layer: StateSpaceLayer, device: str = "cpu", dtype: torch.dtype = torch.float32, invariant: bool = False
) -> AttentionNeeds:
    spec = layer.kv_spec(16, "float32")
    return AttentionNeeds.of([layer], spec, torch.device(device), dtype, batch_invariant=invariant)


class Expected:
    """One sequence in float64: results [T, inner], how far they may be off, and states [T, heads, head_dim, state_size]
    behind each token."""

    def __init__(self, layer: StateSpaceLayer, rows: Tensor) -> None:
        gates, inputs, times = rows.double().split((layer.inner_size, layer.num_channels, layer.num_heads), -1)
        shape = layer.num_heads, layer.head_dim, layer.state_size
        state, size = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        weight, width = layer.conv_weight.cpu().double().t(), layer.conv_width
        decay, skip, bias = (part.cpu().double() for part in (layer.decay, layer.skip, layer.time_step_bias))
        self.inputs = torch.cat((torch.zeros(width - 1, layer.num_channels, dtype=torch.float64), inputs))
        results, allowed, states = [], [], []
        for place in range(len(rows)):
            mixed = (self.inputs[place : place + width] * weight).sum(0)
            mixed = torch.nn.functional.silu(mixed if layer.conv_bias is None else mixed + layer.conv_bias.cpu())
            step = (times[place] + bias).exp().log1p().clamp(*layer.time_step_limit)[:, None]
            x = mixed[: layer.inner_size].view(layer.num_heads, layer.head_dim)
            parts = mixed[layer.inner_size :].view(2, layer.num_groups, layer.state_size)
            written, read = parts.repeat_interleave(layer.num_heads // layer.num_groups, 1)
            kept, gate = (step[:, 0] * decay).exp()[:, None, None], torch.nn.functional.silu(gates[place])
            state = state * kept + (x * step)[..., None] * written[:, None]
            # What sums would be if nothing cancelled, with inputs whose own sums have cancelled
            size = size * kept + ((x.abs() + 1) * step)[..., None] * (written.abs() + 1)[:, None]
            sizes = (size * (read.abs() + 1)[:, None]).sum(-1) + (x * skip[:, None]).abs()
            results.append(((state * read[:, None]).sum(-1) + x * skip[:, None]).flatten() * gate)
            # For each token that the state has gone through, its decay and its sum; then the sum over the state, and
            # what is rounded on the way to the inputs.
            roundings = 16 * (place + 1) + layer.state_size + 64
            allowed.append(roundings * UNIT * sizes.flatten() * (gate.abs() + 1e-3))
            states.append(state)
        self.results, self.allowed, self.states = torch.stack(results), torch.stack(allowed), torch.stack(states)


class StateBatch:
    """Sequences of these lengths, whose pages lie in a mixed order. What was never written is NaN."""

    def __init__(
        self, lengths: Sequence[int], layer: StateSpaceLayer, block_size: int, seed: int = 0, device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.layer, self.block_size, self.device = layer, block_size, device
        size = layer.inner_size + layer.num_channels + layer.num_heads
        self.sequences = [torch.randn(length, size, generator=generator).to(dtype) for length in lengths]
        width = max(-(-length // block_size) for length in lengths)
        order = torch.randperm(len(lengths) * width, generator=generator) + 1
        self.tables = order.to(torch.int32).numpy().reshape(len(lengths), width)

    def pages_of(self, backend: AttentionBackend) -> LayerCache:
        spec = self.layer.kv_spec(self.block_size, "float32")
        assert isinstance(spec, StateSpec)
        num_blocks = self.tables.size + 1
        # Parts of wider rows, as where layers share tensors
        return tuple(
            torch.full((num_blocks, 2, *shape), torch.nan, device=self.device)[:, 1]
            for shape in backend.page_shapes(spec)
        )

    def inputs(
        self, begins: Sequence[int], ends: Sequence[int], padding: int = 0, keeps: bool = True
    ) -> CommonAttentionMetadata:
        """A step in which sequence i goes from begins[i] to ends[i]. `padding`: requests without tokens, and as many
        rows behind the last; then the host's arrays hold other numbers. `keeps`: or all rows go to the null block."""
        counts = np.array([end - begin for begin, end in zip(begins, ends, strict=True)] + [0] * padding)
        positions = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
        owner = np.repeat(np.arange(len(counts)), counts)
        table = np.concatenate([self.tables, np.zeros((padding, self.tables.shape[1]), np.int32)])
        slots = table[owner, positions // self.block_size] * self.block_size + positions % self.block_size
        slots = np.concatenate([slots * keeps, np.zeros(padding, np.int64)]).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lens = np.array([*ends, *[0] * padding], np.int32)
        there = [torch.from_numpy(array).to(self.device) for array in (starts, lens, table, slots)]
        if padding:
            starts, lens, table = np.zeros_like(starts), np.zeros_like(lens), np.zeros_like(table)
        return CommonAttentionMetadata(
            starts, lens, table, there[0], there[1], there[2], there[3], self.block_size, int(counts.max()), max(ends),
            is_padded=padding > 0,
        )  # fmt: skip

    def step(
        self, backend: AttentionBackend, pages: LayerCache, begins: Sequence[int], ends: Sequence[int],
        padding: int = 0, keeps: bool = True,
    ) -> list[Tensor]:  # fmt: skip
        rows = [rows[begin:end] for rows, begin, end in zip(self.sequences, begins, ends, strict=True)]
        rows.append(rows[0].new_full((padding, rows[0].shape[1]), torch.nan))
        metadata = backend.build_metadata(self.inputs(begins, ends, padding, keeps))
        out = backend.scan(self.layer, torch.cat(rows).to(self.device), pages, metadata)
        return list(out.cpu().split([len(part) for part in rows]))[:-1]

    def run(self, backend: AttentionBackend, cuts: Sequence[Sequence[int]] = ()) -> tuple[list[Tensor], LayerCache]:
        """All sequences, each in steps up to its `cuts` and then to its end: results, and the pages."""
        pages = self.pages_of(backend)
        cuts = cuts or [[] for _ in self.sequences]
        ways = [[0, *cut, len(rows)] for cut, rows in zip(cuts, self.sequences, strict=True)]
        outputs: list[list[Tensor]] = [[] for _ in self.sequences]
        for turn in range(max(len(way) for way in ways) - 1):
            begins, ends = ([way[min(turn + more, len(way) - 1)] for way in ways] for more in (0, 1))
            for own, rows in zip(outputs, self.step(backend, pages, begins, ends), strict=True):
                own.append(rows)
        return [torch.cat(own) for own in outputs], pages

    def expected(self) -> list[Expected]:
        return [Expected(self.layer, rows) for rows in self.sequences]

    def check(self, outputs: Sequence[Tensor], factor: float = 1.0) -> None:
        """`factor`: how much more than float32 a backend may be off."""
        for found, expected in zip(outputs, self.expected(), strict=True):
            half = 2.0**-10 if found.dtype != torch.float32 else 0.0  # the result itself is rounded
            allowed = factor * expected.allowed + half * expected.results.abs()
            wrong = (found.double() - expected.results).abs() > allowed
            assert not wrong.any(), (wrong.nonzero(), found[wrong], expected.results[wrong])

    def check_pages(self, pages: LayerCache, is_transposed: bool, factor: float = 1.0) -> None:
        """Behind the last token of each block, and that of the sequence: the state, and the last inputs to the bit. The
        null block was not written."""
        states, histories = (part.cpu() for part in pages)
        assert states[0].isnan().all() and histories[0].isnan().all()
        width = self.layer.conv_width
        for table, expected in zip(self.tables, self.expected(), strict=True):
            length = len(expected.results)
            for block in range(-(-length // self.block_size)):
                last, page = min((block + 1) * self.block_size, length), int(table[block])
                found = states[page].mT if is_transposed else states[page]
                wanted = expected.states[last - 1]
                allowed = factor * (16 * last + 64) * UNIT * (1 + wanted.abs().max())
                torch.testing.assert_close(found.double(), wanted, rtol=0, atol=float(allowed))
                assert torch.equal(histories[page].double(), expected.inputs[last : last + width - 1])
