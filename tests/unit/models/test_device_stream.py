"""Reading tensors to a device by ranges of files, here with the CPU as the device: buffers that are far too small, odd
sizes, several threads, files that change."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ratoon.core.errors import ModelError
from ratoon.layers.stored import TensorSlice
from ratoon.models.device_stream import DeviceStream, open_destination
from ratoon.models.safetensors_source import SafetensorsSource

CPU = torch.device("cpu")
SHAPES = {"row": (3, 5), "one": (1,), "scalar": (), "empty": (0, 4), "deep": (4, 3, 2), "long": (1001,)}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {
        f"{name}.{str(dtype)[6:]}": torch.randn(shape).to(dtype) for name, shape in SHAPES.items() for dtype in DTYPES
    }
    names = sorted(tensors)
    for number in range(2):
        part = {name: tensors[name] for name in names[number::2]}
        save_file(part, tmp_path / f"model-{number + 1:05d}-of-00002.safetensors")
    return tmp_path


@pytest.mark.parametrize("chunk_bytes", [1, 7, 2**20])
def test_tensors_and_parts_read_by_ranges_equal_those_of_the_library(folder: Path, chunk_bytes: int) -> None:
    source, stream = SafetensorsSource(folder), DeviceStream(CPU, chunk_bytes, num_buffers=2)
    for name, shape in source.shapes().items():
        for part in (None, *(TensorSlice(dim, 1, shape[dim]) for dim in range(len(shape)) if shape[dim] > 1)):
            expected, found = source.read(name, part), source.read(name, part, stream)
            assert (found.shape, found.format) == (expected.shape, expected.format)
            assert torch.equal(found.data, expected.data), (name, part)
            assert found.data.is_contiguous()
    stream.close()


def test_threads_share_a_few_buffers(folder: Path) -> None:
    source, stream = SafetensorsSource(folder), DeviceStream(CPU, 64, num_buffers=2)
    names = list(source.shapes()) * 5
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda name: source.read(name, None, stream), names))
    for name, stored in zip(names, found, strict=True):
        assert torch.equal(stored.data, source.read(name).data)
    stream.close()


def test_a_file_that_was_cut_or_removed_since_is_a_clear_error(folder: Path) -> None:
    source, stream = SafetensorsSource(folder), DeviceStream(CPU, 64)
    names = {entry.file.name[6:11]: name for name, entry in source._tensors.items() if entry.shape == (1001,)}
    first, second = sorted(folder.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:100])
    second.unlink()
    with pytest.raises(ModelError, match="the file ends before byte"):
        source.read(names["00001"], None, stream)
    with pytest.raises(ModelError, match="No such file"):
        source.read(names["00002"], None, stream)
    assert not stream._free.empty()  # the buffer is there for others
    stream.close()


def test_a_cpu_needs_no_destination() -> None:
    with open_destination(CPU) as destination:
        assert destination is None
