"""The CUDA backend of state-space layers: what it supports, and the launches of a step (triton_state_kernels.py).

Two launches, or three where there are prompts: the convolution of all tokens, requests of few tokens, requests of many.
Grids depend on numbers of tokens and requests alone and nothing waits for the device, so that a step can be captured in
a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch

from ratoon.attention.interface import (
    AttentionBackend,
    AttentionNeeds,
    CommonAttentionMetadata,
    LayerCache,
    StateBackend,
)
from ratoon.attention.triton_plan import power_of_two
from ratoon.layers.attention import StateSpaceLayer

Tensor = torch.Tensor

MOST_STEPS = 16  # tokens of a request that are computed one after the other: below this, a chunk is mostly empty
MIXED_CHANNELS = 512  # of a program of the convolution
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_CAPABILITY = (8, 0)  # of a CUDA device: bfloat16
_MOST_INT = 2**31 - 1
_STEP_NUMBERS = 4096  # of a state that a program holds in registers
_CHUNK_NUMBERS = 4096  # with twice as many, registers are not enough


class StateTiles(NamedTuple):
    """How a kernel of the scan is compiled."""

    columns: int  # of a head, that a program has
    num_warps: int
    chunk: int = 0  # tokens at a time


def choose_step_tiles(head_dim: int, state_size: int) -> StateTiles:
    """These do not depend on the step: a row's result has the same bits in any of them."""
    whole = 1 << (head_dim - 1).bit_length()
    return StateTiles(max(1, min(whole, _STEP_NUMBERS // power_of_two(state_size))), 4)


def choose_chunk_tiles(head_dim: int, state_size: int, dtype: torch.dtype) -> StateTiles:
    """In float32, products have all their bits, which takes more registers."""
    if dtype == torch.float32:
        return StateTiles(16, 8, 16)
    return StateTiles(max(16, min(power_of_two(head_dim), _CHUNK_NUMBERS // power_of_two(state_size))), 8, 64)


@dataclass(slots=True)
class TritonScanMetadata:
    inputs: CommonAttentionMetadata
    num_requests: int


class TritonStateBackend(StateBackend):
    """`batch_invariant`: a row's result is the same to the bit in any batch and any chunk. Then prompts are computed
    token after token."""

    name = "triton states"
    supports_graphs = True

    def __init__(self, batch_invariant: bool = False) -> None:
        self._most_steps = _MOST_INT if batch_invariant else MOST_STEPS

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        reasons = cls.reasons_of_content(needs)
        if needs.device_type != "cuda":
            reasons.append(f"runs on CUDA, not on {needs.device_type}")
        elif torch.cuda.is_available() and torch.cuda.get_device_capability() < _MIN_CAPABILITY:
            reasons.append("it needs compute capability {}.{} or newer".format(*_MIN_CAPABILITY))
        if find_spec("triton") is None:
            reasons.append("triton is not installed")
        if needs.dtype not in _DTYPES:
            reasons.append(f"computes in float32, bfloat16 or float16, not in {needs.dtype}")
        return reasons

    @classmethod
    def create(cls, needs: AttentionNeeds) -> AttentionBackend:
        return cls(needs.batch_invariant)

    def build_metadata(self, inputs: CommonAttentionMetadata) -> TritonScanMetadata:
        return TritonScanMetadata(inputs, inputs.seq_lens_device.shape[0])

    def scan(
        self, layer: StateSpaceLayer, projected: Tensor, kv_cache: LayerCache, metadata: TritonScanMetadata
    ) -> Tensor:
        from ratoon.attention.triton_state_kernels import chunk_kernel, mix_kernel, step_kernel
        from ratoon.layers.triton.launch import launch

        states, histories = kv_cache
        inputs, num_requests, num_tokens = metadata.inputs, metadata.num_requests, projected.shape[0]
        table, channels = inputs.block_table_device, layer.num_channels
        assert layer.conv_weight.stride(0) == 1, "the weights of one tap lie side by side"
        out = projected.new_empty(num_tokens, layer.inner_size)
        if not num_tokens:
            return out
        mixed = torch.empty(num_tokens, channels, dtype=torch.float32, device=projected.device)
        launch(
            mix_kernel, (num_tokens, -(-channels // MIXED_CHANNELS)),
            projected, layer.conv_weight, layer.skip if layer.conv_bias is None else layer.conv_bias, histories, mixed,
            table, inputs.query_start_loc_device, inputs.seq_lens_device, num_requests, projected.stride(0),
            histories.stride(0), table.stride(0), INNER=layer.inner_size, CHANNELS=channels, WIDTH=layer.conv_width,
            BLOCK_SIZE=inputs.block_size, HAS_BIAS=layer.conv_bias is not None, BLOCK_C=MIXED_CHANNELS, num_warps=4,
        )  # fmt: skip
        arguments = (
            projected, mixed, out, layer.decay, layer.skip, layer.time_step_bias, states, histories, table,
            inputs.query_start_loc_device, inputs.seq_lens_device, inputs.slot_mapping, *layer.time_step_limit,
            self._most_steps, projected.stride(0), states.stride(0), histories.stride(0), table.stride(0),
        )  # fmt: skip
        sizes = {
            "HEADS": layer.num_heads,
            "HEAD_DIM": layer.head_dim,
            "STATE": layer.state_size,
            "GROUPS": layer.num_groups,
            "WIDTH": layer.conv_width,
            "BLOCK_SIZE": inputs.block_size,
            "STATE_PAD": power_of_two(layer.state_size),
            "WIDTH_PAD": 1 << max(layer.conv_width - 2, 0).bit_length(),
        }
        tiles = choose_step_tiles(layer.head_dim, layer.state_size)
        grid = num_requests, layer.num_heads, -(-layer.head_dim // tiles.columns)
        launch(step_kernel, grid, *arguments, COLUMNS=tiles.columns, num_warps=tiles.num_warps, **sizes)
        if inputs.max_query_len > self._most_steps:
            tiles = choose_chunk_tiles(layer.head_dim, layer.state_size, projected.dtype)
            grid = num_requests, layer.num_heads, -(-layer.head_dim // tiles.columns)
            launch(
                chunk_kernel, grid, *arguments, COLUMNS=tiles.columns, CHUNK=tiles.chunk,
                PRECISION="ieee" if projected.dtype == torch.float32 else "tf32", num_warps=tiles.num_warps, **sizes,
            )  # fmt: skip
        return out
