"""The tensors behind the block ids, as the specs of all groups lay them out, and what a plan moves between them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from ratoon.attention.interface import AttentionBackend, LayerCache
from ratoon.core.errors import ConfigError
from ratoon.core.kv import AttachedGroup, KVCacheConfig, KVCacheGroup, KVCacheSpec, lay_out_pages
from ratoon.core.kv_connector import BlockMover
from ratoon.core.outputs import TransferReport
from ratoon.core.plan import SchedulerOutput
from ratoon.core.sizes import format_size
from ratoon.execution.inputs.buffers import indices_on
from ratoon.execution.kv.connector_moves import Arrived, ConnectorMoves
from ratoon.layers.native.pages import new_pages

if TYPE_CHECKING:
    from ratoon.execution.kv.block_kernels import Pages
    from ratoon.execution.kv.block_swaps import BlockSwaps

WORD = torch.int64  # the unit of block copies, for any dtype: pages are whole numbers of words

# Of the buffer on a GPU through which blocks pass on their way from and to the host, and of each part of it that is
# filled and emptied on its own
STAGING_BYTES = 256 * 2**20
STAGING_PART_BYTES = 64 * 2**20
FETCHED_PIECE_BYTES = 128 * 2**20  # of blocks that travel to the device while a connector gives the next ones


class LayerCaches:
    """The caches of one model's layers, and the backends that read them."""

    def __init__(self, groups: Sequence[KVCacheGroup | AttachedGroup], backends: Sequence[AttentionBackend]) -> None:
        """`backends`: one for each of the groups, and behind them one for cross-attention, if there is any."""
        self.backends = list(backends)
        self.group_of_layer = {layer: number for number, group in enumerate(groups) for layer in group.layers}
        self.of_layer: dict[int, LayerCache] = {}
        self.of_cross_layer: dict[int, LayerCache] = {}

    @property
    def cross_backend(self) -> AttentionBackend:
        return self.backends[-1]


class KVTensors(LayerCaches):
    """`backends`: one for each group of the config, the cross group's last. `attached_backends`: for each attached
    group, whose layers have their caches in `attached`."""

    def __init__(
        self,
        config: KVCacheConfig,
        backends: Sequence[AttentionBackend],
        device: torch.device,
        attached_backends: Sequence[AttentionBackend] = (),
    ) -> None:
        super().__init__(config.groups, backends)
        self.attached = LayerCaches(config.attached, attached_backends)
        self._config = config
        self._layout = lay_out_pages(config.all_groups, config.attached)
        self._device = device
        self._tensors: list[torch.Tensor] = []  # [blocks, words]
        self._host_tensors: list[torch.Tensor] = []  # the same, for the block store's host tier on a CPU
        self._pages: Pages | None = None  # for the kernel that copies blocks on CUDA
        self._swaps: BlockSwaps | None = None  # between CUDA and the host tier
        self._connector: ConnectorMoves | None = None  # between the host tier and a connector
        self.allocate()

    def allocate(self) -> None:
        config, widths = self._config, self._layout.tensor_bytes
        try:
            self._tensors = [make_rows(config.num_blocks, width, self._device) for width in widths]
            if self._device.type == "cuda":
                self._use_kernel()
            elif config.num_host_blocks:  # block 0 is not used there either
                self._host_tensors = [make_rows(config.num_host_blocks + 1, width, self._device) for width in widths]
        except (RuntimeError, OSError) as error:  # of torch on a GPU, of the system
            wanted = format_size(config.num_blocks * config.bytes_per_block)
            blocks = f"{config.num_blocks:,} blocks of {config.bytes_per_block:,} bytes"
            problem = f"{wanted} for the KV cache ({blocks}) can't be allocated"
            raise ConfigError(config.sized_by, problem, "less of it, or leave it out") from error
        for number, (group, places) in enumerate(zip(config.all_groups, self._layout.places, strict=True)):
            caches = self.of_cross_layer if group is config.cross else self.of_layer
            for layer, (tensor, start) in zip(group.layers, places, strict=True):
                caches[layer] = view_pages(self._tensors[tensor], start, group.spec, self.backends[number])
        beside = self.attached
        for attached, places, backend in zip(config.attached, self._layout.attached, beside.backends, strict=True):
            for layer, (tensor, start) in zip(attached.layers, places, strict=True):
                beside.of_layer[layer] = view_pages(self._tensors[tensor], start, attached.spec, backend)

    def _use_kernel(self) -> None:
        from ratoon.execution.kv.block_kernels import Pages
        from ratoon.execution.kv.block_swaps import BlockSwaps, CudaCopyStream, pinned_rows

        config = self._config
        self._pages = Pages(self._tensors, self._device)
        if config.num_host_blocks:
            num_words = config.bytes_per_block // WORD.itemsize
            num_staged, part_size = staging_size(config.bytes_per_block, config.num_host_blocks)
            staging = torch.empty((num_staged, num_words), dtype=WORD, device=self._device)
            host = pinned_rows(config.num_host_blocks + 1, num_words)
            self._swaps = BlockSwaps(self._pages, host, staging, part_size, CudaCopyStream(self._device))

    def release(self) -> None:
        """Free the memory. The content of all blocks is lost, and nothing may run before `allocate`."""
        if self._connector is not None:
            self._connector.drain()
        if self._swaps is not None:
            self._swaps.drain()
        self._tensors = []
        self._host_tensors = []
        self._pages = self._swaps = None
        self.of_layer.clear()
        self.of_cross_layer.clear()
        self.attached.of_layer.clear()

    def measure_swaps(self) -> float | None:
        """Seconds to fetch a block from the host. None: it is not known."""
        return None if self._swaps is None else self._swaps.measure()

    def move_blocks(self, plan: SchedulerOutput) -> TransferReport | None:
        """Store, copy on write and load, in all layers and in the plan's order. All sources of copies are read before a
        target is written: a block that was freed and reallocated within the step may be both. Copies between the device
        and host memory do not fail one by one: for the steps that follow, all of them are done."""
        arrived: Arrived | None = None
        if self._connector is not None:
            plan, arrived = self._begin_fetches(plan, self._connector)
        if plan.block_copies or plan.stores or plan.loads:
            if self._pages is not None:
                self._move_by_kernel(plan, self._pages)
            elif not (self._tensors[0].device.type == "cpu" and self._copy_rows(plan)):
                self._move(plan)
        if self._connector is not None and plan.saves:
            self._connector.save(plan.saves)
        if not plan.stores and not plan.loads and arrived is None:
            return None
        report = TransferReport([load.block for load in plan.loads], stored=[store.slot for store in plan.stores])
        if arrived is not None:
            report.failed_loads = [load.block for load in arrived.lost]
            report.failed_stores = [load.slot for load in arrived.lost]
            report.num_fetched, report.fetch_seconds = arrived.num_fetched, arrived.seconds
        return report

    def _begin_fetches(
        self, plan: SchedulerOutput, connector: ConnectorMoves
    ) -> tuple[SchedulerOutput, Arrived | None]:
        """Begin the fetches of a plan. Returns the plan with the loads that can be made now, those of earlier plans
        among them, and what has been fetched since, if anything."""
        connector.settle(store.slot for store in plan.stores)
        loads = connector.fetch(plan.fetches, plan.loads) if plan.fetches else plan.loads
        arrived = connector.take_arrived(plan.awaits_loads) if connector.is_fetching else None
        if arrived is not None and arrived.is_empty:
            arrived = None
        if arrived is not None:
            loads = [*loads, *arrived.loads]
        return (plan if loads is plan.loads else msgspec.structs.replace(plan, loads=loads)), arrived

    def drop_fetches(self) -> None:
        """A step failed: blocks that are on their way to host memory are not loaded into the device any more."""
        if self._connector is not None:
            self._connector.drop_fetches()

    def close(self) -> None:
        """The engine ends: waits for what the connector is to keep."""
        if self._connector is not None:
            self._connector.close()

    def connect(self, mover: BlockMover, has_ranks: bool = False) -> None:
        """Blocks of the host tier are moved from and to a connector by this from now on. `has_ranks`: other workers
        have parts of the same blocks."""
        piece_size = max(1, FETCHED_PIECE_BYTES // self._config.bytes_per_block)
        self._connector = ConnectorMoves(mover, self, None if has_ranks else piece_size, in_step=has_ranks)

    def host_parts(self, slots: Sequence[int]) -> list[list[memoryview]]:
        """The bytes of slots of the host tier, as buffers that may be written to. Copies to and from them have ended:
        the host waits for those that are under way."""
        if self._swaps is not None:
            self._swaps.drain()
            return [[_bytes_of(self._swaps.host_rows[slot])] for slot in slots]
        return [[_bytes_of(tensor[slot]) for tensor in self._host_tensors] for slot in slots]

    def _move(self, plan: SchedulerOutput) -> None:
        copies, device = plan.block_copies, self._tensors[0].device
        sources = indices_on(device, [copy.src for copy in copies])
        targets = indices_on(device, [copy.dst for copy in copies])
        for index, tensor in enumerate(self._tensors):
            for store in plan.stores:
                self._host_tensors[index][store.slot].copy_(tensor[store.block])
            content = tensor.index_select(0, sources)
            for load in plan.loads:
                tensor[load.block].copy_(self._host_tensors[index][load.slot])
            tensor.index_copy_(0, targets, content)

    def _copy_rows(self, plan: SchedulerOutput) -> bool:
        """Copy blocks one by one, on a CPU. False: others are moved too, or a block is both read and written."""
        copies = [(copy.src, copy.dst) for copy in plan.block_copies]
        is_free = {source for source, _ in copies}.isdisjoint(target for _, target in copies)
        if plan.stores or plan.loads or not is_free:
            return False
        for tensor in self._tensors:
            first, size = tensor.data_ptr(), tensor.stride(0) * tensor.itemsize
            for source, target in copies:
                ctypes.memmove(first + target * size, first + source * size, size)
        return True

    def copies_in_any_order(self, plan: SchedulerOutput) -> list[tuple[int, int]] | None:
        """The blocks (from, to) that a plan copies, if it moves no others and `copy_listed` may copy them. None:
        `move_blocks` does it."""
        if self._pages is None or plan.stores or plan.loads:
            return None
        from ratoon.execution.kv.block_kernels import FEW_BLOCKS

        copies = [(copy.src, copy.dst) for copy in plan.block_copies]
        is_free = {source for source, _ in copies}.isdisjoint(target for _, target in copies)
        return copies if is_free and len(copies) > FEW_BLOCKS else None

    def copy_listed(self, pairs: torch.Tensor) -> None:
        """Copy blocks whose numbers (from, to) are on the device, [2N] int32."""
        from ratoon.execution.kv.block_kernels import copy_listed_blocks

        assert self._pages is not None
        copy_listed_blocks(self._pages, self._pages, pairs)

    def _move_by_kernel(self, plan: SchedulerOutput, pages: Pages) -> None:
        """Moves the blocks of a plan on CUDA, without waiting for the device. Copies can go before loads: no block is
        the target of both."""
        from ratoon.execution.kv.block_kernels import copy_blocks

        copies = [(copy.src, copy.dst) for copy in plan.block_copies]
        if plan.stores:
            assert self._swaps is not None
            self._swaps.store(plan.stores)
        if {source for source, _ in copies}.isdisjoint(target for _, target in copies):
            copy_blocks(pages, pages, copies)
        else:  # the kernel reads and writes in no order
            sources = indices_on(self._device, [source for source, _ in copies])
            targets = indices_on(self._device, [target for _, target in copies])
            for tensor in self._tensors:
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))
        if plan.loads:
            assert self._swaps is not None
            self._swaps.load(plan.loads)


def _bytes_of(row: torch.Tensor) -> memoryview:
    return row.numpy().data.cast("B")


def staging_size(block_bytes: int, num_host_blocks: int) -> tuple[int, int]:
    """Blocks of the staging buffer, and of each of its parts."""
    part_size = max(1, min(STAGING_PART_BYTES // block_bytes, num_host_blocks))
    num_parts = max(2, min(STAGING_BYTES // block_bytes, num_host_blocks) // part_size)
    return num_parts * part_size, part_size


def dtype_name(dtype: torch.dtype) -> str:
    """The name without "torch.", as in specs and settings."""
    return str(dtype).removeprefix("torch.")


def make_rows(num_rows: int, row_bytes: int, device: torch.device) -> torch.Tensor:
    """[rows, words] of zeros, so that memory never written holds no NaN. On a CPU the pages are left uncommitted: torch
    would write them all."""
    shape = (num_rows, row_bytes // WORD.itemsize)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=WORD, device=device)
    return new_pages(num_rows * row_bytes).view(WORD).view(shape)


def view_pages(rows: torch.Tensor, start: int, spec: KVCacheSpec, backend: AttentionBackend) -> LayerCache:
    """The tensors of one layer, [rows, …] each, in the bytes of every row from `start` on."""
    views = []
    for tensor, shape in zip(spec.tensors, backend.page_shapes(spec), strict=True):
        end = start + tensor.num_bytes
        elements = rows.view(torch.uint8)[:, start:end].view(getattr(torch, tensor.dtype))
        views.append(elements[:, : math.prod(shape)].view(len(rows), *shape))  # without the padding
        start = end
    return tuple(views)
