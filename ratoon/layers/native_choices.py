"""The kernels of products with quantised weights: from how many rows on which one is taken, on this processor.

All kernels give the same bits. Which one is fastest depends on the processor, the number of threads, and the weight's
shape and format, so it is measured once (native_measurement.py) and kept in a file of the cache folder. A file that
does not fit is replaced, with one line in the log: a warning if it is damaged or of another processor, and no more than
a remark if it is of another version, as every update leaves one.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import re
import stat
import weakref
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ratoon.core.machine import cache_folder, processor
from ratoon.layers.native import QuantisedWeight, kernel_set_name, library
from ratoon.layers.native_formats import PackedWeight

logger = logging.getLogger(__name__)

VERSION = 1  # of the file
MOST_BYTES = 1 << 18  # of a file
MOST_SHAPES = 2048  # in a file
NEVER = 1 << 20  # rows
SHOWN_ROWS = 128  # numbers of rows that `facts` looks at

IN_REGISTERS, UNPACKED, MATRICES = range(3)  # kernels, as ratoon_quantised_kernel numbers them
KERNEL_NAMES = ("in registers", "unpacked", "matrix unit")


class WeightShape(NamedTuple):
    """What the speed of a product depends on, besides the number of rows."""

    bits: int
    group: int
    has_offsets: bool
    in_features: int
    out_features: int

    @classmethod
    def of(cls, weight: PackedWeight) -> WeightShape:
        structure = weight.structure
        return cls(weight.bits, structure.group, bool(structure.offsets), weight.in_features, weight.out_features)

    def __str__(self) -> str:
        more = " with offsets" if self.has_offsets else f" in groups of {self.group}" if self.group != 32 else ""
        return f"{self.bits} bits{more}, {self.in_features} → {self.out_features}"


class RowCounts(NamedTuple):
    """Fields of QuantisedWeight; 0: as by default."""

    unpack_from: int = 0
    matrices_from: int = 0


class Machine(NamedTuple):
    """What a measurement holds for."""

    processor: str  # its name
    features: str  # a digest of its model and instructions
    kernels: str  # the kernel set
    sources: str  # a digest of the C files
    num_threads: int

    def differs(self, other: Mapping[str, Any]) -> str | None:
        """Says for the log how another machine's description differs. None: only its version of the kernels may."""
        for field, text in (
            ("processor", "was measured on another processor"),
            ("features", "was measured on another processor"),
            ("kernels", "was measured with other kernels"),
            ("num_threads", "was measured with another number of threads"),
        ):
            if other.get(field) != getattr(self, field):
                return text
        return None


def this_machine(num_threads: int) -> Machine:
    kernels = library()
    assert kernels is not None
    name, features = processor()
    return Machine(name, features, kernel_set_name(), kernels.ratoon_sources().decode(), num_threads)


def choices_file(machine: Machine) -> Path:
    """One for each processor, kernel set and number of threads; a newer version of the kernels replaces it."""
    name = f"{machine.processor}-{machine.features[:8]}-{machine.kernels}-{machine.num_threads}-threads"
    return cache_folder() / f"cpu-products-{re.sub(r'[^A-Za-z0-9]+', '-', name)}.json"


class KernelChoices:
    """The chosen kernels of one engine's weights."""

    def __init__(self, machine: Machine | None, file: Path | None = None) -> None:
        """None: all weights have the default."""
        self.machine = machine
        self._file = file
        self._measured: dict[WeightShape, RowCounts] = {}
        self._weights: dict[WeightShape, weakref.WeakSet[PackedWeight]] = {}

    @cached_property
    def _kept(self) -> dict[WeightShape, RowCounts]:
        """What the file has; it is not read for a model without quantised weights."""
        if self.machine is None or self._file is None:
            return {}
        return read_choices(self._file, self.machine)

    def add(self, weight: PackedWeight) -> None:
        """A new weight, which gets what is known for its shape."""
        shape = WeightShape.of(weight)
        self._weights.setdefault(shape, weakref.WeakSet()).add(weight)
        _apply(self._measured.get(shape) or self._kept.get(shape) or RowCounts(), weight)

    def unknown(self) -> dict[WeightShape, list[PackedWeight]]:
        """What is to be measured, the weights that a pass reads most of first."""
        if self.machine is None:
            return {}
        known = self._kept.keys() | self._measured.keys()
        found = {shape: list(weights) for shape, weights in self._weights.items() if shape not in known and weights}
        return dict(sorted(found.items(), key=lambda one: -len(one[1]) * one[0].in_features * one[0].out_features))

    def settle(self, shape: WeightShape, counts: RowCounts) -> None:
        self._measured[shape] = counts
        for weight in self._weights[shape]:
            _apply(counts, weight)

    def keep(self) -> None:
        """Write what was measured."""
        if self._measured and self.machine is not None and self._file is not None:
            write_choices(self._file, self.machine, self._measured)

    def facts(self) -> list[dict[str, Any]]:
        """Lists, for display, the kernels of each shape of weights, each with the number of rows that it begins at."""
        found = []
        for shape, weights in self._weights.items():
            if weight := next(iter(weights), None):
                choice = "measured" if shape in self._measured else "cached" if shape in self._kept else "default"
                kernels = kernels_by_rows(weight.structure)
                found.append({"weights": str(shape), "count": len(weights), "kernels": kernels, "choice": choice})
        return found


def kernels_by_rows(structure: QuantisedWeight) -> dict[str, int]:
    """Kernel → the rows from which on a product takes it."""
    kernels = library()
    assert kernels is not None
    address, found, last = ctypes.addressof(structure), {}, None
    for rows in range(1, SHOWN_ROWS):
        kernel = kernels.ratoon_quantised_kernel(address, rows)
        if kernel != last:
            found[KERNEL_NAMES[kernel]], last = rows, kernel
    return found


class _OtherVersion(ValueError):
    """The file was right for the version that wrote it."""


def read_choices(file: Path, machine: Machine) -> dict[WeightShape, RowCounts]:
    """What the file has for this machine; nothing if there is none that fits."""
    try:
        return _parse(_read(file), machine)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        level = logging.INFO if isinstance(error, _OtherVersion) else logging.WARNING
        logger.log(level, "%s is ignored, and products are measured again: %s", file, error)
        return {}


def write_choices(file: Path, machine: Machine, measured: Mapping[WeightShape, RowCounts]) -> None:
    """Writes the file, with what another engine has written meanwhile, in one move: no process reads half a file. A
    folder that can't be written is no error."""
    try:
        known = _parse(_read(file), machine)
    except (OSError, ValueError):
        known = {}
    known = dict(list({**known, **measured}.items())[-MOST_SHAPES:])
    content = {
        "version": VERSION,
        "machine": machine._asdict(),
        "weights": [[*map(int, shape), *counts] for shape, counts in known.items()],
    }
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps({**content, "checksum": _checksum(content)}))
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("the choice of kernels is not kept, and will be measured again at the next start: %s", error)


def _read(file: Path) -> bytes:
    with open(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as opened:  # a pipe would wait
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise ValueError("it is no file")
        content = opened.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError("it is too large")
    return content


def _parse(data: bytes, machine: Machine) -> dict[WeightShape, RowCounts]:
    """Raises ValueError, with what is wrong."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("it is damaged") from None
    if not isinstance(content, dict) or not isinstance(content.get("machine"), dict):
        raise ValueError("it is damaged")
    if content.get("version") != VERSION:
        raise _OtherVersion("it is of another version of Ratoon")
    checksum = content.pop("checksum", None)
    if checksum != _checksum(content):
        raise ValueError("it is damaged")
    if difference := machine.differs(content["machine"]):
        raise ValueError(f"it {difference}")
    if content["machine"].get("sources") != machine.sources:
        raise _OtherVersion("it was measured with another version of the kernels")
    entries = content.get("weights")
    if not isinstance(entries, list) or len(entries) > MOST_SHAPES:
        raise ValueError("it is damaged")
    return dict(map(_parse_entry, entries))


def _parse_entry(entry: Any) -> tuple[WeightShape, RowCounts]:
    numbers = entry if isinstance(entry, list) and all(type(number) is int for number in entry) else []
    if len(numbers) != len(WeightShape._fields) + len(RowCounts._fields):
        raise ValueError("it is damaged")
    bits, group, has_offsets, inputs, outputs, *counts = numbers
    if bits not in (4, 8) or group not in (16, 32) or has_offsets not in (0, 1) or min(inputs, outputs) < 1:
        raise ValueError("it is damaged")
    if not all(0 <= count <= NEVER for count in counts):
        raise ValueError("it is damaged")
    return WeightShape(bits, group, bool(has_offsets), inputs, outputs), RowCounts(*counts)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _apply(counts: RowCounts, weight: PackedWeight) -> None:
    weight.structure.unpack_from, weight.structure.matrices_from = counts
