"""Digests of models, which depend on what files hold, and not on where they are or when they were written: one by which
workers on several hosts notice that they read different models, and one for what is computed with the weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import torch

from ratoon.core.config import ModelConfig
from ratoon.layers.weights import TensorSource
from ratoon.models.safetensors_source import find_weight_files

TENSORS_TO_READ = 16  # the smallest: norms and biases, which differ between versions of a model

# Of a file of weights: its first bytes, which are its header, and as many pieces at equal distances, the last one at
# its end. With 512 of them, a matrix of 20 MB in a file of 10 GB has one at least.
HEAD_BYTES = 2**20
NUM_PIECES = 512
PIECE_BYTES = 4096


def digest_of_model(config: ModelConfig, tensors: TensorSource) -> str:
    """Returns a digest of the config, of the names and shapes of all tensors, and of the numbers of the smallest."""
    shapes = tensors.shapes()
    digest = blake2b(repr(config).encode(), digest_size=16)
    for name, shape in sorted(shapes.items()):
        digest.update(f"{name} {tuple(shape)}\0".encode())
    for name in sorted(shapes, key=lambda name: (math.prod(shapes[name]), name))[:TENSORS_TO_READ]:
        data = tensors.read(name).data.contiguous()
        digest.update(data.view(torch.uint8).numpy().tobytes() if data.dim() else repr(data.item()).encode())
    return digest.hexdigest()


def digest_of_weights(tensors: TensorSource) -> str:
    """Returns a digest of the names and shapes of all tensors, and of samples of their files: to read all numbers
    would take as long as to load them. Weights that are not from files have their name instead."""
    files = _files_of(tensors)
    parts = [f"{name} {tuple(shape)}" for name, shape in sorted(tensors.shapes().items())]
    parts += map(digest_of_file, files) if files else [tensors.name]
    return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _files_of(tensors: TensorSource) -> list[Path]:
    path = Path(tensors.name)
    if path.is_dir():
        return find_weight_files(path)
    return [path] if path.is_file() else []


def digest_of_file(file: Path) -> str:
    """Returns a digest of the size of a file and of samples of its bytes. Within a process, a file is read once."""
    facts = file.stat()
    return _digest_of_samples(str(file.resolve()), facts.st_size, facts.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _digest_of_samples(file: str, size: int, changed_at: int) -> str:
    """`changed_at` is for the cache alone."""
    digest = blake2b(f"{size}\0".encode(), digest_size=16)
    with open(file, "rb", buffering=0) as stream:
        for offset, count in _places_of_samples(size):
            digest.update(_read(stream, offset, count))
    return digest.hexdigest()


def _places_of_samples(size: int) -> Iterator[tuple[int, int]]:
    """Offsets and numbers of bytes: those of the whole file where it is no longer than its samples."""
    if size <= HEAD_BYTES + NUM_PIECES * PIECE_BYTES:
        yield 0, size
        return
    yield 0, HEAD_BYTES
    rest = size - HEAD_BYTES - PIECE_BYTES
    for number in range(NUM_PIECES):
        yield HEAD_BYTES + rest * number // (NUM_PIECES - 1), PIECE_BYTES


def _read(stream: BinaryIO, offset: int, count: int) -> bytes:
    stream.seek(offset)
    return stream.read(count)
