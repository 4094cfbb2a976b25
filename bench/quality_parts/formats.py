"""Files of one model in every format that is kept in its own bits, made from a GGUF file by plain rounding.

They show what keeping a format loses against the same file decoded, not how well a quantiser of that format does: those
that people use choose scales with more care.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from export_hf import export_model
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

Array = np.ndarray
GPTQ_GROUP = 64
PACKAGE_FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # the gguf package writes these
K_BLOCK = 256


def make_file(model: Path, name: str, folder: Path) -> Path:
    """The GGUF file `model` with its large tensors in a format, or as a folder of GPTQ; made once."""
    if name == "GPTQ":
        return _make_gptq(folder)
    path = folder / f"{model.stem}-{name}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        _write_gguf(gguf.GGUFReader(model), name, partial)
        partial.rename(path)
    return path


def _write_gguf(reader: gguf.GGUFReader, name: str, path: Path) -> None:
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if numbers.ndim < 2:
            writer.add_tensor(tensor.name, numbers.astype(np.float32))
            continue
        # A row that blocks of 256 do not divide is in Q8_0, as llama.cpp has it in another format then.
        chosen = name if name in PACKAGE_FORMATS or numbers.shape[1] % K_BLOCK == 0 else "Q8_0"
        data = encode(numbers, chosen)
        writer.add_tensor(tensor.name, data, raw_dtype=Type[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encode(numbers: Array, name: str) -> Array:
    """[rows, inputs] floats → [rows, bytes]."""
    if name in PACKAGE_FORMATS:
        return gguf.quants.quantize(numbers, Type[name])
    blocks = numbers.astype(np.float32).reshape(-1, K_BLOCK)
    return ENCODERS[name](blocks).reshape(len(numbers), -1)


def _encode_q6_k(x: Array) -> Array:
    groups = x.reshape(-1, 16, 16)
    sizes = np.abs(groups).max(-1) / 31
    whole = _half(sizes.max(-1, keepdims=True) / 127)
    scales = np.rint(_divide(sizes, whole)).astype(np.int8)
    codes = np.rint(_divide(groups, (whole * scales)[..., None])).clip(-32, 31).astype(np.int8) + 32
    parts = codes.astype(np.uint8).reshape(-1, 2, 4, 32)  # two halves of four times 32
    low = np.concatenate([parts[:, :, :2] & 15 | parts[:, :, 2:] << 4], -1).reshape(len(x), -1)
    high = sum((parts[:, :, i] >> 4) << 2 * i for i in range(4))
    return np.concatenate([low, high.reshape(len(x), -1), scales.view(np.uint8), _bytes(whole)], 1)


def _encode_4_or_5(x: Array, bits: int) -> Array:
    groups, largest = x.reshape(-1, 8, 32), 2**bits - 1
    minima = np.minimum(groups.min(-1), 0)
    sizes = (groups.max(-1) - minima) / largest
    whole, whole_minimum = _half(sizes.max(-1, keepdims=True) / 63), _half(-minima.min(-1, keepdims=True) / 63)
    scales, offsets = (np.rint(_divide(a, b)).clip(0, 63) for a, b in ((sizes, whole), (-minima, whole_minimum)))
    shifted = groups + (whole_minimum * offsets)[..., None]
    codes = np.rint(_divide(shifted, (whole * scales)[..., None])).clip(0, largest).astype(np.uint8)
    scales, offsets = scales.astype(np.uint8), offsets.astype(np.uint8)
    small = [scales[:, :4] | scales[:, 4:] >> 4 << 6, offsets[:, :4] | offsets[:, 4:] >> 4 << 6]
    small.append(scales[:, 4:] & 15 | (offsets[:, 4:] & 15) << 4)
    low = (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).reshape(len(x), -1)
    high = [sum((codes[:, g] >> 4) << g for g in range(8))] if bits == 5 else []
    return np.concatenate([_bytes(whole), _bytes(whole_minimum), *small, *high, low], 1)


def _encode_q4_k(x: Array) -> Array:
    return _encode_4_or_5(x, 4)


def _encode_q5_k(x: Array) -> Array:
    return _encode_4_or_5(x, 5)


def _half(numbers: Array) -> Array:
    return numbers.astype(np.float16).astype(np.float32)


def _bytes(numbers: Array) -> Array:
    return numbers.astype(np.float16).view(np.uint8)


def _divide(a: Array, b: Array) -> Array:
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)


def _make_gptq(folder: Path) -> Path:
    """4 bits in groups of 64 with zero points, for the linear layers of the embedded model's body."""
    target = folder / "smollm2-135m-gptq"
    if target.exists():
        return target
    floats = export_model("smollm2-135m", folder / "smollm2-135m-floats")
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(floats, partial, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {}
    for name, weight in load_file(floats / "model.safetensors").items():
        if weight.dim() == 2 and ".layers." in name:
            tensors |= {f"{name.removesuffix('weight')}{part}": data for part, data in _gptq_parts(weight).items()}
        else:
            tensors[name] = weight
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((partial / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": GPTQ_GROUP}
    (partial / "config.json").write_text(json.dumps(config))
    partial.rename(target)
    return target


def _gptq_parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = weight.unflatten(1, (-1, GPTQ_GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-6).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).flatten(1)
    return {
        "qweight": _words(codes.t().int(), 0),
        "qzeros": _words((zeros.t() - 1).int(), 1),
        "scales": scales.t().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GPTQ_GROUP,
    }


def _words(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight codes in a word, from the lowest bits on, along a dimension."""
    eights = codes.long().movedim(dim, -1).unflatten(-1, (-1, 8))
    packed = (eights << (torch.arange(8) * 4)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().movedim(-1, dim).contiguous()


ENCODERS: dict[str, Callable[[Array], Array]] = {
    "Q4_K": _encode_q4_k,
    "Q5_K": _encode_q5_k,
    "Q6_K": _encode_q6_k,
}
FORMATS = (*PACKAGE_FORMATS, *ENCODERS, "GPTQ")
