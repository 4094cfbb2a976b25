"""Serialisation of hidden states: their metadata, their bytes, and the header of a safetensors file.

For the server and the command line. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

if TYPE_CHECKING:
    from ratoon.core.outputs import HiddenStatesOutput

TENSOR = "hidden_states"  # its name in a safetensors file
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
SLICE = 2**20  # bytes per slice
LOWEST = -9999.0  # what OpenAI writes for minus infinity

_json = msgspec.json.encode  # fast: there may be very many positions


def facts(output: HiddenStatesOutput) -> dict[str, Any]:
    """All but the numbers. With a lens, the shape is that of the norms."""
    shape = [len(output.layers), len(output.positions)] if output.tensor is None else list(output.tensor.shape)
    return {
        "dtype": output.dtype,
        "shape": shape,
        "layers": list(output.layers),
        "positions": list(output.positions),
        "token_ids": list(output.token_ids),
        "computed_tokens": output.computed_tokens,
        "cached_tokens": output.num_cached_tokens,
        "source": output.source,
    }


def lens_entries(output: HiddenStatesOutput, text_of: Callable[[int], str]) -> list[list[list[dict[str, Any]]]]:
    """What a lens shows: of each layer and position, the most probable tokens. JSON has no infinite numbers: a
    log-probability is -9999 at least."""
    return [
        [
            [
                {"token_id": token_id, "token": text_of(token_id), "logprob": max(entry.logprob, LOWEST)}
                for token_id, entry in tokens.items()
            ]
            for tokens in rows
        ]
        for rows in output.lens or ()
    ]


def raw_bytes(tensor: Any) -> memoryview:
    """The numbers of a numpy array or a torch tensor: row by row, little-endian. Copied only if the order differs."""
    import numpy

    if not isinstance(tensor, numpy.ndarray):
        import torch

        # numpy has no bfloat16: its bytes are read as uint16.
        tensor = tensor.cpu().contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy()
    return numpy.asarray(tensor, tensor.dtype.newbyteorder("<")).reshape(-1).view(numpy.uint8).data


def safetensors_head(dtype: str, shape: Sequence[int], num_bytes: int, notes: Mapping[str, Any]) -> bytes:
    """The part before the numbers. Metadata values must be text in this format: others are written as JSON."""
    texts = {name: value if isinstance(value, str) else _json(value).decode() for name, value in notes.items()}
    entry = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [0, num_bytes]}
    head = _json({"__metadata__": texts, TENSOR: entry})
    head += b" " * (-len(head) % 8)  # so that the numbers begin at a multiple of their size
    return len(head).to_bytes(8, "little") + head


def as_safetensors(output: HiddenStatesOutput, **notes: Any) -> tuple[bytes, memoryview]:
    """A safetensors file with one tensor, in two parts. Its metadata has the facts, beside `notes`."""
    told = facts(output)
    data = raw_bytes(output.tensor)
    notes |= {name: value for name, value in told.items() if name not in ("dtype", "shape") and value is not None}
    return safetensors_head(output.dtype, told["shape"], data.nbytes, notes), data


def read_head(file: BinaryIO) -> tuple[str, list[int], dict[str, str]]:
    """The dtype, the shape and the metadata of such a file."""
    head = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")))
    dtypes = {short: name for name, short in SAFETENSORS_DTYPES.items()}
    return dtypes[head[TENSOR]["dtype"]], head[TENSOR]["shape"], head["__metadata__"]


def to_numbers(data: memoryview, dtype: str, shape: Sequence[int]) -> Any:
    """A numpy array of these bytes. bfloat16 becomes float32, of which it is the upper half."""
    import numpy

    if dtype == "bfloat16":
        wide = numpy.frombuffer(data, "<u2").astype("<u4") << 16
        return wide.view("<f4").reshape(shape)
    return numpy.frombuffer(data, {"float32": "<f4", "float16": "<f2"}[dtype]).reshape(shape)


def cut(data: memoryview, size: int = SLICE) -> Iterator[memoryview]:
    """Consecutive slices, not copied."""
    return (data[start : start + size] for start in range(0, data.nbytes, size))
