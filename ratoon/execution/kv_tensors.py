"""The tensors behind the block ids: one for each slot of layers, shared by the j-th layers of all groups."""

from __future__ import annotations

import math

import numpy as np
import torch

from ratoon.attention.interface import AttentionBackend
from ratoon.core.errors import ConfigError
from ratoon.core.kv import KVCacheConfig
from ratoon.core.plan import SchedulerOutput
from ratoon.execution.buffers import indices_on

HOST = torch.device("cpu")


class KVTensors:
    def __init__(
        self, config: KVCacheConfig, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
    ) -> None:
        prices = {group.spec.bytes_per_block for group in config.all_groups}
        assert len(prices) == 1, "groups share tensors, so their blocks must be of one size"
        self._config = config
        self._shape = backend.kv_shape(config.num_blocks, config.groups[0].spec)
        self._dtype = dtype
        self._device = device
        self._tensors: list[torch.Tensor] = []
        self.group_of_layer = {layer: number for number, group in enumerate(config.groups) for layer in group.layers}
        self.of_layer: dict[int, torch.Tensor] = {}
        self.of_cross_layer: dict[int, torch.Tensor] = {}
        self._host_tensors: list[torch.Tensor] = []  # the same blocks again, for what is swapped out
        self.allocate()

    def allocate(self) -> None:
        config = self._config
        num_tensors = max(len(group.layers) for group in config.all_groups)
        try:
            self._tensors = [_zeros(self._shape, self._dtype, self._device) for _ in range(num_tensors)]
            if config.num_host_blocks:
                host_shape = (config.num_host_blocks + 1, *self._shape[1:])  # block 0 is nobody's there either
                self._host_tensors = [_zeros(host_shape, self._dtype, HOST) for _ in range(num_tensors)]
        except (RuntimeError, MemoryError) as error:  # torch's and numpy's ways of saying that memory ran out
            wanted = config.num_blocks * config.bytes_per_block
            raise ConfigError(
                "num_blocks",
                f"{config.num_blocks} blocks of {config.bytes_per_block:,} bytes ({wanted / 2**30:.1f} GiB) don't fit",
                "lower num_blocks, kv_memory or kv_memory_fraction",
            ) from error
        for group in config.groups:
            self.of_layer.update(zip(group.layers, self._tensors, strict=False))
        if config.cross is not None:
            self.of_cross_layer.update(zip(config.cross.layers, self._tensors, strict=False))

    def release(self) -> None:
        """Give the memory back. Nothing may run before `allocate`, and what the blocks held is gone."""
        self._tensors = []
        self._host_tensors = []
        self.of_layer.clear()
        self.of_cross_layer.clear()

    def move_blocks(self, plan: SchedulerOutput) -> None:
        """What is swapped out, copied on write and swapped in, in all layers and in the plan's order. All sources of
        copies are read before a target is written: a block that was freed and handed out again within the step may be
        both."""
        copies = plan.block_copies
        if not (copies or plan.swapped_out or plan.swapped_in):
            return
        device = self._tensors[0].device
        sources = indices_on(device, [copy.src for copy in copies])
        targets = indices_on(device, [copy.dst for copy in copies])
        for index, tensor in enumerate(self._tensors):
            for block, host_block in plan.swapped_out:
                self._host_tensors[index][host_block].copy_(tensor[block])
            content = tensor[sources]
            for host_block, block in plan.swapped_in:
                tensor[block].copy_(self._host_tensors[index][host_block])
            tensor[targets] = content


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, so that nothing that was never written is NaN. On a CPU as untouched pages: torch would write them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
