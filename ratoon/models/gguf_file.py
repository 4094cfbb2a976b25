"""Reads GGUF files: the header (metadata and the list of tensors) and the blocks of one tensor at a time.

Independent of models. The `gguf` package reads the same files, but spends seconds on building an object for every
word of the vocabulary; here the header of a 50,000-word model takes some 50 ms. gguf_quants.py decodes blocks.
"""

from __future__ import annotations

import mmap
import struct
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ratoon.core.errors import ModelError
from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.models.gguf_quants import BlockLayout, block_layout, dequantize, plain_dtype

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4  # of a tensor, by the format
MAX_NESTING = 2  # of arrays in metadata; files in use have none

# Metadata value types. The scalars by their struct format; strings and arrays are handled separately.
SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING_TYPE = 8
ARRAY_TYPE = 9


class TensorInfo(NamedTuple):
    """Where a tensor lies in the file. `shape` has the slowest dimension first, as in PyTorch."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    layout: BlockLayout
    offset: int  # from the start of the file
    num_bytes: int


class GGUFFile:
    """An open GGUF file. Opening reads the header and checks that all tensors lie inside the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._data = _map_file(path)
        cursor = _Cursor(self._data, str(path))
        num_tensors, num_values = self._read_counts(cursor)
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        self._read_tensor_list(cursor, num_tensors)

    def read(self, name: str, part: TensorSlice | None = None) -> StoredTensor:
        """The tensor, in the memory that the file is mapped to."""
        import torch

        info = self.tensors[name]
        if info.num_bytes == 0:
            return StoredTensor.of_floats(torch.zeros(info.shape), part)
        data = torch.frombuffer(self._data, dtype=torch.uint8, count=info.num_bytes, offset=info.offset)
        dtype = plain_dtype(info.type_id)
        if dtype is not None:
            return StoredTensor.of_floats(data.view(dtype).view(info.shape), part)
        blocks = data.view(*info.shape[:-1], -1, info.layout.num_bytes)
        decode = partial(dequantize, type_id=info.type_id)
        whole = StoredTensor(info.shape, info.layout.format, blocks, decode)
        if part is None:
            return whole
        length = info.layout.length if part.dim == len(info.shape) - 1 else 1  # only the last dimension is in blocks
        if part.start % length or part.stop % length:
            return StoredTensor.of_floats(whole.floats(), part)
        blocks = blocks[TensorSlice(part.dim, part.start // length, part.stop // length).slices()]
        return StoredTensor(part.shape(info.shape), info.layout.format, blocks, decode)

    def _read_counts(self, cursor: _Cursor) -> tuple[int, int]:
        source = str(self.path)
        magic = cursor.take(4)
        if magic != MAGIC:
            raise ModelError(source, f"is not a GGUF file: it begins with {magic!r}", f"expected {MAGIC!r}")
        version = cursor.scalar("I")
        if version not in SUPPORTED_VERSIONS:
            expected = f"expected version {' or '.join(map(str, SUPPORTED_VERSIONS))}, little-endian"
            raise ModelError(source, f"has GGUF version {version}", expected)
        return cursor.scalar("Q"), cursor.scalar("Q")

    def _read_tensor_list(self, cursor: _Cursor, num_tensors: int) -> None:
        entries = []
        for _ in range(num_tensors):
            name = cursor.string()
            num_dimensions = cursor.scalar("I")
            if num_dimensions > MAX_DIMENSIONS:
                raise ModelError(str(self.path), f"is damaged: tensor {name!r} has {num_dimensions} dimensions")
            shape = tuple(reversed(cursor.scalars("Q", num_dimensions)))  # the file has the fastest first
            entries.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(str(self.path), f"is damaged: general.alignment is {alignment!r}")
        start = -(-cursor.position // alignment) * alignment
        for name, shape, type_id, offset in entries:
            self._add_tensor(name, shape, type_id, start + offset)

    def _add_tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> None:
        source = str(self.path)
        if name in self.tensors:
            raise ModelError(source, f"is damaged: tensor {name!r} is there twice")
        layout = block_layout(type_id, source, name)
        row_length = shape[-1] if shape else 1
        if row_length % layout.length:
            raise ModelError(source, f"is damaged: rows of {name!r} are not whole blocks of {layout.length}")
        num_elements = 1
        for size in shape:
            num_elements *= size
        num_bytes = num_elements // layout.length * layout.num_bytes
        if offset + num_bytes > len(self._data):
            raise ModelError(
                source,
                f"is cut short: tensor {name!r} ends at byte {offset + num_bytes:,}, the file at {len(self._data):,}",
                "fetch the file again",
            )
        self.tensors[name] = TensorInfo(name, shape, type_id, layout, offset, num_bytes)


class _Cursor:
    """Reads values one after the other; reading past the end raises ModelError."""

    def __init__(self, data: mmap.mmap, source: str) -> None:
        self.data = data
        self.source = source
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise self._cut_short(end)
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def scalars(self, form: str, count: int) -> tuple[Any, ...]:
        end = self.position + struct.calcsize("<" + form) * count
        if end > len(self.data):
            raise self._cut_short(end)
        values = struct.unpack_from(f"<{count}{form}", self.data, self.position)
        self.position = end
        return values

    def scalar(self, form: str) -> Any:
        return self.scalars(form, 1)[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        """The hot loop of the whole header: vocabularies and merges are some 100,000 strings."""
        data, position, limit = self.data, self.position, len(self.data)
        unpack_length = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            if position + 8 > limit:
                raise self._cut_short(position + 8)
            begin = position + 8
            position = begin + unpack_length(data, position)[0]
            if position > limit:
                raise self._cut_short(position)
            found.append(data[begin:position].decode("utf-8", errors="replace"))
        self.position = position
        return found

    def value(self, type_id: int, depth: int = 0) -> Any:
        if depth > MAX_NESTING:
            raise ModelError(self.source, f"is damaged: arrays in arrays before byte {self.position:,}")
        if type_id == STRING_TYPE:
            return self.string()
        if type_id == ARRAY_TYPE:
            item_type, count = self.scalar("I"), self.scalar("Q")
            if item_type == STRING_TYPE:
                return self.strings(count)
            if item_type == ARRAY_TYPE:
                return [self.value(ARRAY_TYPE, depth + 1) for _ in range(count)]
            return list(self.scalars(self._format(item_type), count))
        return self.scalar(self._format(type_id))

    def _format(self, type_id: int) -> str:
        if type_id not in SCALAR_FORMATS:
            raise ModelError(
                self.source, f"is damaged: metadata of unknown type {type_id} before byte {self.position:,}"
            )
        return SCALAR_FORMATS[type_id]

    def _cut_short(self, end: int) -> ModelError:
        problem = f"is cut short: its header goes on to byte {end:,} or further, the file ends at {len(self.data):,}"
        return ModelError(self.source, problem, "fetch the file again")


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # A private mapping: torch warns about read-only memory, and writes do not reach the file.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError as error:  # mmap refuses an empty file
        raise ModelError(str(path), "is empty", "fetch the file again") from error
    except OSError as error:
        raise ModelError(str(path), f"can't be opened: {error.strerror}") from error
