"""How layers get their weights: by name and expected shape, while they are built.

A model is built twice. First on the meta device, where names and shapes are compared and the tensors to read are
recorded: a file that does not match is refused before memory is allocated. Then with its weights. Loading is strict
both ways: a missing tensor is an error, and so is one that no layer takes. Where the tensors come from (files, random
numbers) is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from ratoon.core.errors import ModelError
from ratoon.layers.adapters import AdaptedProduct, AdapterTarget, TableTarget
from ratoon.layers.ops import Ops, WeightUse
from ratoon.layers.shard import Shard, Stage
from ratoon.layers.stored import FLOAT_FORMATS, StoredTensor, TensorSlice
from ratoon.layers.torch_ops import TorchOps


class Destination(Protocol):
    """A device that tensors can be made on, or read to, without all of them in the host's memory."""

    device: torch.device

    def read(self, file: Path, offset: int, num_bytes: int) -> torch.Tensor:
        """A range of a file: [num_bytes] uint8, on the device. Threads may read at the same time."""
        ...


class TensorSource(Protocol):
    """Named tensors of one checkpoint. Reading the shapes costs no memory."""

    name: str  # for messages: the file or folder

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, part: TensorSlice | None = None, destination: Destination | None = None) -> StoredTensor:
        """The stored tensor in its file's format; with `part`, only that part is read. It is at its destination if the
        source has a way of its own there, otherwise on the CPU."""
        ...


class TensorRequest(NamedTuple):
    """What a layer takes of one tensor."""

    name: str
    part: TensorSlice | None = None  # None: all of it
    transposed: bool = False  # the layer needs the transpose of the checkpoint's tensor
    as_stored: bool = False  # keep the file's format if Ops supports it; otherwise convert to floats
    use: WeightUse = WeightUse.OTHER


class WeightNotes:
    """What was noticed about weights while they were read, for a line in the log."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}  # by the note

    def add(self, note: str, name: str) -> None:
        self._names.setdefault(note, []).append(name)

    def lines(self) -> list[str]:
        """A line for each note, with the first names."""
        return [f"{note}: {_first_of(list(dict.fromkeys(names)), 3)}" for note, names in self._names.items()]


def _first_of(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def read_tensor(
    source: TensorSource,
    ops: Ops,
    request: TensorRequest,
    destination: Destination | None = None,
    notes: WeightNotes | None = None,
) -> StoredTensor:
    """The slow part of taking a tensor: reading and, if Ops does not support its format, decoding."""
    stored = source.read(request.name, request.part, destination)
    if request.transposed:
        stored = stored.t()
    stored = ops.quantize(stored, request.use)
    if notes is not None and request.as_stored and (note := ops.note_on(stored, request.use)):
        notes.add(note, request.name)
    if request.as_stored and not stored.transposed and ops.find_format(stored) is not None:
        return stored
    if stored.decode is None and stored.format not in FLOAT_FORMATS.values():
        expected = f"one of {', '.join(FLOAT_FORMATS.values())}"
        raise ModelError(source.name, f"tensor {request.name!r} is stored as {stored.format}", expected)
    return StoredTensor.of_floats(stored.floats())


class Weights:
    """A view of a checkpoint below a prefix, with the device, dtype and Ops for its tensors."""

    def __init__(
        self,
        source: TensorSource,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        shard: Shard | None = None,
        fetch: Callable[[TensorRequest], StoredTensor] | None = None,
        stage: Stage | None = None,
    ) -> None:
        """`shard` and `stage`: this worker's among several. `fetch` replaces `read_tensor`, for example to read
        ahead."""
        self.source = source
        self.ops = ops
        self.device = device
        self.dtype = dtype
        self.shard = shard or Shard()
        self.stage = stage or Stage()
        self.prefix = ""
        self.counts_experts = False  # routers count the rows of each expert
        self.adapter_targets: dict[str, AdapterTarget] = {}  # of all views, by the name of the layer
        self.adapter_tables: dict[str, TableTarget] = {}
        self.requests: list[TensorRequest] = []  # of all views, in the order of the second pass
        # Of all views: parts that are not read, their numbers of tensors and what these are for
        self.left_out: dict[str, tuple[int, str]] = {}
        self._fetch = fetch or partial(read_tensor, source, ops)
        self._placed: set[str] = set()  # taken or ignored, by all views
        self._padding: tuple[int, int] | None = None  # a size in the checkpoint, and that of layers in its place

    def __truediv__(self, name: object) -> Weights:
        """`weights / "layers" / 3` is the view below `layers.3`."""
        below = copy(self)
        below.prefix = f"{self.prefix}{name}."
        return below

    def on_stages(self, first: bool = False, last: bool = False) -> Weights:
        """Returns this view on the first and on the last stage, as asked for. On another stage, returns a view whose
        tensors have shapes and no memory: what is built from it is never called there."""
        if (first and self.stage.is_first) or (last and self.stage.is_last):
            return self
        elsewhere = copy(self)
        elsewhere.device, elsewhere.ops = torch.device("meta"), TorchOps()
        elsewhere.adapter_targets, elsewhere.adapter_tables, elsewhere.requests = {}, {}, []
        return elsewhere

    def replicated(self, adapted: bool = False) -> Weights:
        """Returns a view of these weights for layers that every rank has whole. Unless they are `adapted`, adapters do
        not change them: encoders of pictures."""
        whole = copy(self)
        whole.shard = Shard()
        if not adapted:
            whole.adapter_targets, whole.adapter_tables = {}, {}
        return whole

    def for_encoder(self) -> Weights:
        """Returns a view of these weights for the layers of an encoder, whose sequences run whole."""
        view = copy(self)
        view.ops = self.ops.for_encoders()
        return view

    def padded(self, size: int, padded_size: int) -> Weights:
        """Returns a view of these weights for layers that have `padded_size` where the checkpoint has `size`, with
        zeros behind: sizes that formats and fast kernels take. It is for whole tensors, of which no other dimension is
        `padded_size`."""
        view = copy(self)
        view._padding = size, padded_size
        return view

    def has(self, name: str) -> bool:
        return self.prefix + name in self.source.shapes()

    def take(
        self, name: str, *shape: int, part: TensorSlice | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The tensor `name` below this prefix, which must have this shape, or a part of it, as floats on the device."""
        return self._take(TensorRequest(self.prefix + name, part), shape, dtype or self.dtype).data

    def take_stored(
        self,
        name: str,
        *shape: int,
        part: TensorSlice | None = None,
        transposed: bool = False,
        use: WeightUse = WeightUse.OTHER,
    ) -> StoredTensor:
        """Takes a tensor in its file's format, or in that of Ops. Shape and part are those in the checkpoint."""
        request = TensorRequest(self.prefix + name, part, transposed, as_stored=True, use=use)
        return self._take(request, shape, self.dtype)

    def _take(self, request: TensorRequest, shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
        if self._padding is not None and self._padding[1] in shape:
            return self._take_padded(request, shape, *self._padding).to(self.device, dtype)
        self._compare(request.name, shape)
        self._placed.add(request.name)
        self.requests.append(request)
        if self.device.type != "meta":
            return self._fetch(request).to(self.device, dtype)
        taken = shape if request.part is None else request.part.shape(shape)
        taken = taken[::-1] if request.transposed else taken
        stored = StoredTensor.of_floats(torch.empty(taken, dtype=dtype, device=self.device))
        return self.ops.quantize(stored, request.use)

    def _take_padded(self, request: TensorRequest, shape: tuple[int, ...], size: int, padded_size: int) -> StoredTensor:
        """The tensor with its zeros, which is quantised only then."""
        assert request.part is None and not request.transposed, "whole tensors are padded"
        in_file = tuple(size if length == padded_size else length for length in shape)
        plain = TensorRequest(request.name)
        self._compare(request.name, in_file)
        self._placed.add(request.name)
        self.requests.append(plain)
        if self.device.type == "meta":
            return StoredTensor.of_floats(torch.empty(shape, dtype=self.dtype, device=self.device))
        zeros = [length for wanted, found in zip(shape[::-1], in_file[::-1]) for length in (0, wanted - found)]
        numbers = functional.pad(self._fetch(plain).floats(), zeros)
        stored = self.ops.quantize(StoredTensor.of_floats(numbers), request.use)
        is_kept = request.as_stored and self.ops.find_format(stored) is not None
        return stored if is_kept else StoredTensor.of_floats(stored.floats())

    def _compare(self, name: str, shape: tuple[int, ...]) -> None:
        found = self.source.shapes().get(name)
        if found is None:
            raise ModelError(self.source.name, f"tensor {name!r} is missing", f"the model needs it with shape {shape}")
        if tuple(found) != shape:
            raise ModelError(
                self.source.name, f"tensor {name!r} has shape {tuple(found)}", f"the config asks for {shape}"
            )

    def add_target(
        self,
        product: AdaptedProduct,
        shape: tuple[int, int],
        inputs: range,
        outputs: Sequence[range],
        order: Sequence[int] | None = None,
    ) -> AdapterTarget:
        """Registers the adapters' target for the linear layer whose weight is below this prefix, and whose columns are
        the next ones of the product, in this order."""
        name = self.prefix.removesuffix(".")
        self.adapter_targets[name] = target = AdapterTarget(product, name, shape, inputs, outputs, order)
        return target

    def add_table(self, shape: tuple[int, int], rows: range, own: Callable[[], torch.Tensor]) -> TableTarget:
        """Registers the adapters' target for the table of tokens below this prefix, whose rows `own` returns."""
        name = self.prefix.removesuffix(".")
        self.adapter_tables[name] = target = TableTarget(self.ops, name, shape, rows, own)
        return target

    def ignore(self, *names: str) -> None:
        """Tensors that the file may hold and the model does not need (stored rotary tables, tied copies)."""
        self._placed.update(self.prefix + name for name in names)

    def ignore_below(self, name: str, purpose: str) -> None:
        """Ignores all tensors below `name`, which is a part of the checkpoint that is known and left out: a line in the
        log, with what they do there."""
        prefix = f"{self.prefix}{name}."
        found = [tensor for tensor in self.source.shapes() if tensor.startswith(prefix)]
        self._placed.update(found)
        if found:
            self.left_out[prefix.removesuffix(".")] = len(found), purpose

    def check_nothing_left(self) -> None:
        left = sorted(set(self.source.shapes()) - self._placed)
        if left:
            raise ModelError(
                self.source.name,
                f"holds tensors that this model has no place for: {_first_of(left, 5)}",
                "a config and weights of one model",
            )
