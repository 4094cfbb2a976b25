"""FlashInfer as a second backend on CUDA: long prompts are attended to by its kernels (FA3 on Hopper).

Everything else is the Triton backend's, whose pages have FlashInfer's layout "HND": writing keys and values, decoding,
also beside prompts, and steps in CUDA graphs. FlashInfer compiles a kernel when it is first used, unless its package of
compiled ones is installed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ratoon.attention.interface import AttentionNeeds, CommonAttentionMetadata
from ratoon.attention.triton_backend import TritonAttentionBackend
from ratoon.attention.triton_plan import Operands, TritonMetadata
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer

Tensor = torch.Tensor

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer recommends
# Scores (queries × keys) of a step's prompts from which on it is used: with fewer, its kernels save less time in some
# thirty layers than the host takes to plan the step
_MIN_SCORES = 2**23


@dataclass(slots=True)
class Wrapper:
    """One of FlashInfer's, which is planned for a step and then run for its layers."""

    wrapper: Any
    copied: torch.cuda.Event | None = None  # its plan is on the device: its host memory may be used again


@dataclass(frozen=True, slots=True)
class Prompts:
    """The requests of a step that FlashInfer attends to: those from `first` to `end`, with rows `begin` to `stop`."""

    first: int
    end: int
    begin: int
    stop: int


@dataclass(slots=True)
class FlashInferMetadata(TritonMetadata):
    # By what a plan depends on beside the step: query heads, scale, causality
    planned: dict[tuple[int, float, bool], Wrapper] = field(default_factory=dict)


class FlashInferBackend(TritonAttentionBackend):
    name = "flashinfer"

    def __init__(self) -> None:
        super().__init__()
        self._flashinfer = import_module("flashinfer")
        self._workspace: Tensor | None = None
        self._wrappers: list[Wrapper] = []

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        reasons = super().reasons_against(needs)
        if find_spec("flashinfer") is None:
            reasons.append("flashinfer is not installed")
        if needs.dtype not in _DTYPES:
            reasons.append(f"computes in bfloat16 or float16, not in {needs.dtype}")
        if needs.kv_dtype is not None:
            reasons.append(f"keeps keys and values in {needs.dtype}, not in {needs.kv_dtype}")
        if needs.head_dim not in _HEAD_DIMS:
            reasons.append(f"head_dim must be {', '.join(map(str, _HEAD_DIMS))}, not {needs.head_dim}")
        if needs.window is not None:
            reasons.append("has no sliding windows: blocks before them are freed")
        if needs.has_bias:
            reasons.append("adds no bias to scores")
        if needs.batch_invariant:
            reasons.append("its results depend on the batch")
        return reasons

    @classmethod
    def create(cls, needs: AttentionNeeds) -> FlashInferBackend:
        return cls()

    def build_metadata(self, inputs: CommonAttentionMetadata) -> FlashInferMetadata:
        query_lens = None if inputs.is_padded else np.diff(inputs.query_start_loc)
        return FlashInferMetadata(inputs, inputs.seq_lens_device.shape[0], query_lens, {}, {})

    def _attend_long(self, operands: Operands, shortest: int) -> None:
        layer, q, metadata = operands.layer, operands.q, operands.metadata
        assert isinstance(metadata, FlashInferMetadata)
        prompts = None if metadata.query_lens is None else find_prompts(metadata.inputs, metadata.query_lens, shortest)
        if prompts is None:
            super()._attend_long(operands, shortest)
            return
        key = layer.num_heads, layer.scale, layer.causal
        if key not in metadata.planned:
            metadata.planned[key] = self._plan(layer, q, metadata, prompts)
        rows = slice(prompts.begin, prompts.stop)
        out = operands.out.view(q.shape)[rows]
        # It could start before the kernel that writes keys and values has ended: that one allows it.
        metadata.planned[key].wrapper.run(q[rows], operands.pages, out=out, enable_pdl=False)

    def _plan(
        self, layer: AttentionLayer | CrossAttentionLayer, q: Tensor, metadata: FlashInferMetadata, prompts: Prompts
    ) -> Wrapper:
        inputs, requests = metadata.inputs, slice(prompts.first, prompts.end)
        seq_lens = inputs.seq_lens[requests]
        starts = inputs.query_start_loc[prompts.first : prompts.end + 1] - prompts.begin
        tables = page_tables(inputs.block_table[requests], seq_lens, inputs.block_size)
        lists = [host_tensor(numbers, q.is_cuda) for numbers in (starts, *tables, seq_lens)]
        chosen = self._free_wrapper(q.device, metadata)
        chosen.wrapper.plan(
            *lists[:4], layer.num_heads, layer.num_kv_heads, layer.head_dim, inputs.block_size, causal=layer.causal,
            sm_scale=layer.scale, q_data_type=q.dtype, kv_data_type=q.dtype, seq_lens=lists[4],
        )  # fmt: skip
        if q.is_cuda:
            chosen.copied = torch.cuda.current_stream().record_event()
        return chosen

    def _free_wrapper(self, device: torch.device, metadata: FlashInferMetadata) -> Wrapper:
        """One that this step has not planned, and whose last plan was copied to the device."""
        for known in self._wrappers:
            is_copied = known.copied is None or known.copied.query()
            if is_copied and all(known is not other for other in metadata.planned.values()):
                return known
        if self._workspace is None:  # used by one kernel after the other
            self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        made = Wrapper(self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND"))
        self._wrappers.append(made)
        return made


def find_prompts(inputs: CommonAttentionMetadata, query_lens: np.ndarray, shortest: int) -> Prompts | None:
    """The requests with `shortest` or more query tokens, if they follow each other in the batch and there is much to
    compute for them; None: they are left to Triton."""
    found = np.flatnonzero(query_lens >= shortest)
    first, end = int(found[0]), int(found[-1]) + 1
    scores = int((query_lens[first:end].astype(np.int64) * inputs.seq_lens[first:end]).sum())
    if end - first != len(found) or scores < _MIN_SCORES:
        return None
    return Prompts(first, end, int(inputs.query_start_loc[first]), int(inputs.query_start_loc[end]))


def page_tables(
    block_table: np.ndarray, seq_lens: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """FlashInfer's form of block tables [R, max_blocks]: where each request's pages begin [R + 1], all pages one after
    the other, and how much of each last one is filled [R]."""
    num_pages = -(-seq_lens // block_size)
    starts = np.concatenate([[0], np.cumsum(num_pages)])
    pages = block_table[:, : num_pages.max()][np.arange(num_pages.max()) < num_pages[:, None]]
    return starts, pages, seq_lens - (num_pages - 1) * block_size


def host_tensor(numbers: np.ndarray, pinned: bool) -> Tensor:
    """FlashInfer reads it here, and copies it to the device without waiting if it is pinned."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int32))
    return tensor.pin_memory() if pinned else tensor
