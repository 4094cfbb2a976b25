"""Weights of Whisper in whisper.cpp's container, as the tensors of a Hugging Face folder. Unquantised files only.

The container, all numbers of 32 bits: magic, 11 sizes, mel filters, vocabulary, then tensors up to the end of the file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import numpy as np

MAGIC = 0x67676D6C  # "ggml"
NUM_SIZES = 11
DTYPES = {0: np.dtype(np.float32), 1: np.dtype(np.float16)}

# The parts of a layer: OpenAI's names, and those of transformers.
LAYER_PARTS = {
    "attn.query": "self_attn.q_proj",
    "attn.key": "self_attn.k_proj",
    "attn.value": "self_attn.v_proj",
    "attn.out": "self_attn.out_proj",
    "attn_ln": "self_attn_layer_norm",
    "cross_attn.query": "encoder_attn.q_proj",
    "cross_attn.key": "encoder_attn.k_proj",
    "cross_attn.value": "encoder_attn.v_proj",
    "cross_attn.out": "encoder_attn.out_proj",
    "cross_attn_ln": "encoder_attn_layer_norm",
    "mlp.0": "fc1",
    "mlp.2": "fc2",
    "mlp_ln": "final_layer_norm",
}
OTHER_PARTS = {
    "encoder.conv1": "encoder.conv1",
    "encoder.conv2": "encoder.conv2",
    "encoder.ln_post": "encoder.layer_norm",
    "decoder.ln": "decoder.layer_norm",
    "decoder.token_embedding": "decoder.embed_tokens",
}
POSITIONS = ".positional_embedding"  # a tensor without a part of its own
LAYER = re.compile(r"(encoder|decoder)\.blocks\.(\d+)\.(.+)")


def transformers_tensors(data: bytes) -> dict[str, np.ndarray]:
    """By transformers' names, in float16, as the model was published."""
    tensors = {}
    for name, array in _read_tensors(data):
        is_bias = name.endswith(".bias")  # those of convolutions have a second dimension here, of size 1
        tensors[_transformers_name(name)] = (array.reshape(-1) if is_bias else array).astype(np.float16)
    return tensors


def _transformers_name(name: str) -> str:
    if name.endswith(POSITIONS):
        return f"model.{name.removesuffix(POSITIONS)}.embed_positions.weight"
    part, _, kind = name.rpartition(".")  # kind: weight or bias
    layer = LAYER.fullmatch(part)
    if layer is None:
        return f"model.{OTHER_PARTS[part]}.{kind}"
    side, index, part = layer.groups()
    return f"model.{side}.layers.{index}.{LAYER_PARTS[part]}.{kind}"


def _read_tensors(data: bytes) -> Iterator[tuple[str, np.ndarray]]:
    (magic,) = struct.unpack_from("<I", data)
    if magic != MAGIC:
        raise ValueError("not a file of whisper.cpp")
    at = _behind_vocabulary(data, 4 + 4 * NUM_SIZES)
    while at < len(data):
        num_dimensions, name_length, kind = struct.unpack_from("<3i", data, at)
        at += 12
        shape = struct.unpack_from(f"<{num_dimensions}i", data, at)[::-1]  # the fastest dimension is written first
        at += 4 * num_dimensions
        name = data[at : at + name_length].decode("ascii")
        at += name_length
        dtype, count = DTYPES[kind], int(np.prod(shape))
        yield name, np.frombuffer(data, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize


def _behind_vocabulary(data: bytes, at: int) -> int:
    """Mel filters and tokens: both are known otherwise."""
    num_bands, num_frequencies = struct.unpack_from("<2i", data, at)
    at += 8 + 4 * num_bands * num_frequencies
    (num_tokens,) = struct.unpack_from("<i", data, at)
    at += 4
    for _ in range(num_tokens):
        (length,) = struct.unpack_from("<i", data, at)
        at += 4 + length
    return at
