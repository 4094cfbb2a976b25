"""Files of one model in every format that is kept in its own bits, made from a GGUF file by plain rounding.

They show what keeping a format loses against the same file decoded, not how well a quantiser of that format does: those
that people use choose scales with more care.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from export_hf import export_model
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

Array = np.ndarray
GROUP = 64  # inputs that share a scale, in 4 bits of a Hugging Face folder
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of 8, of each four bits of a word
PACKAGE_FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # the gguf package writes these
FLOAT_FORMATS = ("F16", "BF16")  # and these
K_BLOCK = 256


def make_file(model: Path, name: str, folder: Path, table: str | None = None) -> Path:
    """The GGUF file `model` with its large tensors in a format, or a folder of packed ones; made once.

    `table` is another format for the vocabulary's, as llama.cpp's own quantiser has one.
    """
    if name in PACKED:
        return _make_packed(name, folder)
    path = folder / f"{model.stem}-{name}{f'-table-{table}' if table else ''}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        _write_gguf(gguf.GGUFReader(model), name, table or name, partial)
        partial.rename(path)
    return path


def _write_gguf(reader: gguf.GGUFReader, name: str, table: str, path: Path) -> None:
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
        wanted = table if tensor.name == "token_embd.weight" else name
        chosen = wanted if wanted not in ENCODERS or numbers.shape[1] % K_BLOCK == 0 else "Q8_0"
        data = encode(numbers, chosen)
        writer.add_tensor(tensor.name, data, raw_dtype=Type[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encode(numbers: Array, name: str) -> Array:
    """[rows, inputs] floats → [rows, bytes]."""
    if name not in ENCODERS:
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


def _make_packed(name: str, folder: Path) -> Path:
    """The linear layers of the embedded model's body in one of PACKED, as a Hugging Face folder."""
    target = folder / f"smollm2-135m-{name.lower()}"
    if target.exists():
        return target
    floats = export_model("smollm2-135m", folder / "smollm2-135m-floats")
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(floats, partial, ignore=shutil.ignore_patterns("*.safetensors"))
    make_parts, description = PACKED[name]
    tensors = {}
    for key, weight in load_file(floats / "model.safetensors").items():
        if weight.dim() == 2 and ".layers." in key:
            tensors |= {f"{key.removesuffix('weight')}{part}": data for part, data in make_parts(weight).items()}
        else:
            tensors[key] = weight
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((partial / "config.json").read_text())
    config["quantization_config"] = description
    (partial / "config.json").write_text(json.dumps(config))
    partial.rename(target)
    return target


def _round_with_zeros(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of 4 bits [out, in], zero points from 1 on and scales [out, groups]."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-6).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).flatten(1)
    return codes.int(), zeros.int(), scales


def _gptq_parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, zeros, scales = _round_with_zeros(weight)
    return {
        "qweight": _words(codes.t(), 0),
        "qzeros": _words(zeros.t() - 1, 1),
        "scales": scales.t().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def _awq_parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, zeros, scales = _round_with_zeros(weight)
    order = torch.arange(len(weight)).unflatten(0, (-1, 8))[:, list(AWQ_ORDER)].flatten()
    return {
        "qweight": _words(codes.t()[:, order], 1),
        "qzeros": _words(zeros.t()[:, order], 1),
        "scales": scales.t().contiguous(),
    }


def _w4a16_parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7.5).clamp(min=1e-6).half()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).flatten(1) + 8
    shape = torch.tensor(weight.shape)
    return {"weight_packed": _words(codes.int(), 1), "weight_scale": scales, "weight_shape": shape}


def _w8a8_parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """One scale for all inputs of an output."""
    scales = (weight.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-6)
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


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
PACKED: dict[str, tuple[Callable[[torch.Tensor], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "GPTQ": (_gptq_parts, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "AWQ": (_awq_parts, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "W4A16": (
        _w4a16_parts,
        {"quant_method": "compressed-tensors", "format": "pack-quantized",
         "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": GROUP, "symmetric": True}}}},
    ),
    "W8A8": (
        _w8a8_parts,
        {"quant_method": "compressed-tensors", "format": "int-quantized",
         "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel", "symmetric": True}}}},
    ),
}  # fmt: skip
FORMATS = (*PACKAGE_FORMATS, *ENCODERS, *FLOAT_FORMATS, *PACKED)
