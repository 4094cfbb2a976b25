"""The safetensors files of a Hugging Face folder as a TensorSource. Headers are read at once, tensors on demand: mapped
into memory by the library, or by their range of the file where a device reads them.

Every file is checked against its header first: one that is truncated, damaged or missing is an error before memory is
allocated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ratoon.core.errors import ModelError
from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.models.damage import FETCH_AGAIN, reading, shorten, show
from ratoon.models.tokenizer import read_json

if TYPE_CHECKING:
    from ratoon.layers.weights import Destination

INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FLOATING_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class HeaderEntry(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    dtype: str  # in safetensors' spelling
    offset: int  # of its first byte in the file


class SafetensorsSource:
    """Implements TensorSource for one folder."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self.folder = folder
        self._tensors = self._read_headers()
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._open_files: dict[Path, Any] = {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def formats(self) -> Mapping[str, str]:
        """How each tensor is stored, in safetensors' spelling: F32, BF16, F8_E4M3, …"""
        return {name: tensor.dtype for name, tensor in self._tensors.items()}

    def read(self, name: str, part: TensorSlice | None = None, destination: Destination | None = None) -> StoredTensor:
        from safetensors import safe_open

        entry = self._tensors[name]
        if destination is not None and entry.dtype in FLOATING_BYTES:
            return _read_range(entry, part, destination)
        with reading(str(entry.file)):
            if entry.file not in self._open_files:
                self._open_files[entry.file] = safe_open(str(entry.file), framework="pt", device="cpu")
            file = self._open_files[entry.file]
            data = file.get_tensor(name) if part is None else file.get_slice(name)[part.slices()]
        return StoredTensor(tuple(data.shape), entry.dtype, data)

    def most_common_dtype(self) -> str:
        """The dtype of most numbers in the checkpoint, for configs without one."""
        totals: dict[str, int] = {}
        for tensor in self._tensors.values():
            name = DTYPE_NAMES.get(tensor.dtype, "float32")
            totals[name] = totals.get(name, 0) + math.prod(tensor.shape)
        return max(totals, key=totals.__getitem__) if totals else "float32"

    def _read_headers(self) -> dict[str, HeaderEntry]:
        found: dict[str, HeaderEntry] = {}
        for file in find_weight_files(self.folder):
            for name, tensor in read_header(file).items():
                if name in found:
                    both = f"{found[name].file.name} and {file.name}"
                    raise ModelError(self.name, f"tensor {name!r} is in two files: {both}", "each tensor once")
                found[name] = tensor
        self._check_index(found)
        return found

    def _check_index(self, found: Mapping[str, HeaderEntry]) -> None:
        for name, file in read_json(self.folder / INDEX_FILE).get("weight_map", {}).items():
            if name not in found or found[name].file.name != file:
                raise ModelError(
                    self.name, f"{INDEX_FILE} has tensor {name!r} in {file}, which lacks it", "fetch both again"
                )


def find_weight_files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint: those of the index, or model.safetensors, or all shards."""
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if weight_map is not None:
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ModelError(str(folder / INDEX_FILE), "weight_map is no object of file names", "fetch the file again")
        return _all_present(folder, sorted(set(weight_map.values())))
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    # Mistral's folders also have the weights in another format.
    names = [name for name in names if not name.startswith("consolidated")] or names
    if not names:
        raise ModelError(
            str(folder), "has no safetensors files" + _pickled_weights(folder), "the weights as .safetensors files"
        )
    return _all_present(folder, _with_missing_shards(names))


def read_header(file: Path) -> dict[str, HeaderEntry]:
    """Names, shapes and types; raises ModelError if they do not match the file's size."""
    with reading(str(file)):
        return _read_header(file)


def _read_header(file: Path) -> dict[str, HeaderEntry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
            problem = (
                f"is cut short or no safetensors file: {size:,} bytes, its header alone would have {header_bytes:,}"
            )
            raise ModelError(str(file), problem, "fetch the file again")
        try:
            header = json.loads(stream.read(header_bytes))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            _check_types(entries)
            end = 8 + header_bytes + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            tensors = {
                name: HeaderEntry(
                    file, tuple(entry["shape"]), entry["dtype"], 8 + header_bytes + entry["data_offsets"][0]
                )
                for name, entry in entries.items()
            }
            _check_sizes(file, entries)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelError(str(file), f"has a damaged header: {shorten(repr(error))}", FETCH_AGAIN) from error
    if end != size:
        how = "is cut short" if size < end else "is longer than it should be"
        raise ModelError(str(file), f"{how}: {size:,} bytes, its header asks for {end:,}", "fetch the file again")
    return tensors


def _read_range(entry: HeaderEntry, part: TensorSlice | None, destination: Destination) -> StoredTensor:
    """Rows of a tensor are one range of the file; for another part all of it is read, and cut on the device."""
    import torch

    shape = entry.shape
    row_bytes = FLOATING_BYTES[entry.dtype] * math.prod(shape[1:])
    first = 0
    if part is not None and part.dim == 0:
        first, shape, part = part.start, part.shape(shape), None
    num_bytes = row_bytes * shape[0] if shape else row_bytes
    data = destination.read(entry.file, entry.offset + first * row_bytes, num_bytes)
    numbers = data.view(getattr(torch, {"F64": "float64", **DTYPE_NAMES}[entry.dtype])).view(shape)
    return StoredTensor.of_floats(numbers if part is None else numbers[part.slices()].contiguous())


def _check_types(entries: Mapping[str, Any]) -> None:
    """Raise ValueError for an invalid entry."""
    for name, entry in entries.items():
        numbers = [*entry["shape"], *entry["data_offsets"]]
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError(f"{show(name)} has the shape {show(entry['shape'])} at {show(entry['data_offsets'])}")
        if not isinstance(entry["dtype"], str):
            raise ValueError(f"{show(name)} has the dtype {show(entry['dtype'])}")


def _check_sizes(file: Path, entries: Mapping[str, Any]) -> None:
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        width = FLOATING_BYTES.get(entry["dtype"])
        if width is not None and end - begin != width * math.prod(entry["shape"]):
            problem = f"has a damaged header: {show(name)} of shape {show(entry['shape'])} in {end - begin:,} bytes"
            raise ModelError(str(file), problem, "fetch the file again")


def _all_present(folder: Path, names: list[str]) -> list[Path]:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(str(folder), f"lacks {shown}", f"all {len(names)} weight files")
    return [folder / name for name in names]


def _with_missing_shards(names: list[str]) -> list[str]:
    """Shard names contain their number: without an index, that reveals a missing one."""
    expected = set(names)
    for name in names:
        if match := re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", name):
            total = int(match[3])
            expected |= {f"{match[1]}-{shard:05d}-of-{match[3]}.safetensors" for shard in range(1, total + 1)}
    return sorted(expected)


def _pickled_weights(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    return f", only {pickled[0]}, a pickle, which is never opened" if pickled else ""
