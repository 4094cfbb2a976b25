"""The CPU backend of state-space layers: float32, by the kernel in layers/native/state_space.c, on all threads of the
pool. A token's result is one fixed chain of operations on the state before it, so it has the same bits in any batch and
for any cut of a prompt into steps.

A page holds the state of each head transposed, [state_size][head_dim], so that nothing is summed across a vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ratoon.attention.interface import (
    AttentionNeeds,
    CommonAttentionMetadata,
    LayerCache,
    StateBackend,
)
from ratoon.core.kv import KVCacheSpec
from ratoon.layers.attention import StateSpaceLayer
from ratoon.layers.native import library, reason_for_none
from ratoon.layers.native.recording import new_floats

Tensor = torch.Tensor


@dataclass(slots=True)
class CpuScanMetadata:
    """Pointers into the arrays of a step, which `inputs` keeps alive."""

    slots: int
    num_tokens: int
    block_table: int
    table_width: int
    query_start: int
    seq_lens: int
    num_requests: int
    inputs: CommonAttentionMetadata

    @property
    def places(self) -> tuple[int, ...]:
        """The addresses and sizes of the arrays."""
        arrays = self.slots, self.block_table, self.query_start, self.seq_lens
        return *arrays, self.num_tokens, self.table_width, self.num_requests


class CpuStateBackend(StateBackend):
    name = "cpu states"
    supports_recording = True

    def __init__(self) -> None:
        kernels = library()
        assert kernels is not None, "check `reasons_against` first"
        self._kernels = kernels

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        reasons = cls.reasons_of_content(needs)
        if needs.device_type != "cpu":
            reasons.append(f"runs on the CPU, not on {needs.device_type}")
        if needs.dtype != torch.float32:
            reasons.append(f"computes in float32, not in {needs.dtype}")
        if library() is None:
            reasons.append(reason_for_none())
        return reasons

    def page_shapes(self, spec: KVCacheSpec) -> list[tuple[int, ...]]:
        (num_heads, head_dim, state_size), history = super().page_shapes(spec)
        return [(num_heads, state_size, head_dim), history]

    def build_metadata(self, inputs: CommonAttentionMetadata) -> CpuScanMetadata:
        table = inputs.block_table
        assert table.dtype == inputs.query_start_loc.dtype == inputs.seq_lens.dtype == np.int32
        return CpuScanMetadata(
            slots=inputs.slot_mapping.data_ptr(),
            num_tokens=inputs.slot_mapping.shape[0],
            block_table=table.ctypes.data,
            table_width=table.strides[0] // table.itemsize,
            query_start=inputs.query_start_loc.ctypes.data,
            seq_lens=inputs.seq_lens.ctypes.data,
            num_requests=len(inputs.seq_lens),
            inputs=inputs,
        )

    def update_metadata(self, metadata: CpuScanMetadata, inputs: CommonAttentionMetadata) -> bool:
        return inputs is metadata.inputs or self.build_metadata(inputs).places == metadata.places

    def scan(
        self, layer: StateSpaceLayer, projected: Tensor, kv_cache: LayerCache, metadata: CpuScanMetadata
    ) -> Tensor:
        states, histories = kv_cache
        rows = metadata.num_tokens
        assert layer.conv_weight.stride(0) == 1, "the weights of one tap lie side by side"
        out = new_floats(rows, layer.inner_size)
        scratch = new_floats(rows, layer.num_channels + 2 * layer.num_heads)
        failed = self._kernels.ratoon_scan(
            projected.data_ptr(), projected.stride(0), out.data_ptr(), layer.inner_size, layer.conv_weight.data_ptr(),
            None if layer.conv_bias is None else layer.conv_bias.data_ptr(), layer.decay.data_ptr(),
            layer.skip.data_ptr(), layer.time_step_bias.data_ptr(), *layer.time_step_limit,
            states.data_ptr(), states.stride(0) * states.itemsize, histories.data_ptr(),
            histories.stride(0) * histories.itemsize, metadata.block_table, metadata.table_width, metadata.query_start,
            metadata.seq_lens, metadata.slots, metadata.num_requests, layer.num_heads, layer.head_dim,
            layer.state_size, layer.num_groups, layer.conv_width, metadata.inputs.block_size, scratch.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError("the kernel of state-space layers ran out of memory")
        return out
