"""The slots of adapters on one device: a thread reads their files into them while steps go on.

The plan says which adapter goes into which slot, when no step reads the slot any more, and a later result says that it
is there. Which adapters are kept is the scheduler's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext

import torch

from ratoon.core.adapters import Adapter, AdapterLoad, AdapterReport
from ratoon.core.errors import ModelError
from ratoon.execution.devices import use_device
from ratoon.models.adapters import FittedAdapter, Shapes, digest_of, fit, open_adapter
from ratoon.models.base import LanguageModel

logger = logging.getLogger(__name__)

IDLE_WAIT = 0.05  # seconds that a step without other work waits for an adapter


class AdapterSlots:
    def __init__(
        self, model: LanguageModel, shapes: Shapes, num_slots: int, max_rank: int, device: torch.device
    ) -> None:
        """`model`: with open slots, of which this worker may have a part. `shapes`: of the tensors of its files."""
        self._model = model
        self._shapes = shapes
        self._num_slots = num_slots
        self._max_rank = max_rank
        self._device = device
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._hashing = ThreadPoolExecutor(1, "adapter-digests")  # beside it
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._loads: dict[int, tuple[Adapter, Future[None]]] = {}  # the last of each slot
        self._untold: dict[int, Future[None]] = {}  # those that no result has told of

    def begin(self, loads: Sequence[AdapterLoad]) -> None:
        """Begins to load adapters. One that its slot has already, or is being loaded there, is reported again."""
        for load in loads:
            known = self._loads.get(load.slot)
            if known is None or known[0] != load.adapter or _has_failed(known[1]):
                launched = None
                if self._stream is not None:  # what steps before have launched may still read the slot
                    launched = torch.cuda.Event()
                    launched.record()
                future = self._thread.submit(self._load, load, launched)
                self._loads[load.slot] = known = load.adapter, future
            self._untold[load.slot] = known[1]

    def require(self, slots: Iterable[int]) -> None:
        """Waits until these slots are loaded. They are where the result that said so is this worker's own; of several
        ranks, one tells for all."""
        for slot in slots:
            known = self._loads.get(slot)
            if known is None:
                raise ValueError(f"a row has the adapter in slot {slot}, which was never loaded")
            known[1].result()

    @property
    def is_loading(self) -> bool:
        return any(not future.done() for _, future in self._loads.values())

    def report(self, waits: bool = False) -> AdapterReport | None:
        """What became of loads since the last report; None: there is nothing new. `waits`: for a moment, until there
        is."""
        if not self._untold:
            return None
        if waits:
            wait(self._untold.values(), IDLE_WAIT, FIRST_COMPLETED)
        ended = {slot: future for slot, future in self._untold.items() if future.done()}
        if not ended:
            return None
        report = AdapterReport([], {})
        for slot, future in ended.items():
            del self._untold[slot]
            error = future.exception()
            if error is None:
                report.loaded.append(slot)
            else:
                report.failed[slot] = str(error)
        return report

    def release(self) -> None:
        """Lets go of the model, whose weights are freed. Adapters that are being loaded get their end first."""
        wait([future for _, future in self._loads.values()])
        del self._model

    def reload(self, model: LanguageModel) -> None:
        """Loads what slots had into those of a model that was built anew. One whose files are gone is empty, and a step
        that needs it fails."""
        self._model = model
        for slot, (adapter, _) in list(self._loads.items()):
            self._loads[slot] = adapter, self._thread.submit(self._load, AdapterLoad(slot, adapter), None)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._hashing.shutdown(wait=True, cancel_futures=True)

    # ---- on the thread ----

    def _load(self, load: AdapterLoad, launched: torch.cuda.Event | None) -> None:
        begin, adapter = time.perf_counter(), load.adapter
        digest = self._hashing.submit(digest_of, adapter.path)
        use_device(self._device)
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(), on_stream:
            if launched is not None:
                launched.wait()
            self._clear(load.slot)
            try:
                self._read(load.slot, self._open(adapter))
                if self._stream is not None:
                    self._stream.synchronize()
                if digest.result() != adapter.digest:
                    raise ModelError(
                        adapter.path, "has changed since the adapter was named", "load it again by its name"
                    )
            except BaseException:
                self._clear(load.slot)
                raise
        logger.info(
            "adapter %s is in slot %d after %.0f ms", adapter.path, load.slot, 1e3 * (time.perf_counter() - begin)
        )

    def _open(self, adapter: Adapter) -> FittedAdapter:
        fitted = fit(open_adapter(adapter.path, self._model.config), self._shapes)
        if fitted.rank > self._max_rank:
            raise ModelError(adapter.path, f"has the rank {fitted.rank}", f"at most {self._max_rank} (max_lora_rank)")
        return fitted

    def _read(self, slot: int, fitted: FittedAdapter) -> None:
        """Reads an adapter into a slot. In a pipeline, this stage reads what its own layers need."""
        file, model = fitted.file, self._model
        for layer, name in fitted.layers.items():
            target, table = model.adapter_targets.get(layer), model.adapter_tables.get(layer)
            if name in file.parts:
                if target is not None:
                    target.load(slot, *file.read(name), file.parts[name].scale)
                elif table is not None:
                    table.load_low_rank(slot, *file.read(name), file.parts[name].scale)
                elif model.stage.count == 1:
                    raise ModelError(file.name, f"has matrices for {layer!r}", "a linear layer of the model")
            elif target is not None:
                target.load_weight(slot, file.read_saved(name))
            elif table is not None:
                table.load(slot, file.read_saved(name))

    def _clear(self, slot: int) -> None:
        for target in {id(target.product): target for target in self._model.adapter_targets.values()}.values():
            target.clear(slot)
        for table in self._model.adapter_tables.values():
            table.clear(slot)


def open_slots(model: LanguageModel, num_slots: int, max_rank: int) -> None:
    """Makes room for adapters beside all layers of a model. Their matrices take memory when they are loaded."""
    for target in model.adapter_targets.values():
        target.open_slots(num_slots, max_rank, model.device, model.dtype)
    for table in model.adapter_tables.values():
        table.open_slots(num_slots, model.device, model.dtype)


def bytes_of_slots(model: LanguageModel, num_slots: int, max_rank: int) -> int:
    """The memory of so many adapters of the highest rank on this worker, for all layers but the head: whole heads and
    tables, which few adapters have, come on top."""
    sizes = [target.numbers_of_rank for target in model.adapter_targets.values() if not target.is_head]
    return num_slots * max_rank * model.dtype.itemsize * sum(sizes)


def _has_failed(future: Future[None]) -> bool:
    return future.done() and future.exception() is not None
