"""Adapters with random matrices for a model of any shape, as PEFT saves them. Only their speed means something."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

DEVIATION = 0.02


def make_adapters(folder: Path, shapes: Mapping[str, tuple[int, ...]], count: int, rank: int, dtype: str) -> list[Path]:
    """Writes folders of adapters for all linear layers between embeddings and head, given the shapes of the model's
    tensors. Those that are there already stay."""
    import torch
    from safetensors.torch import save_file

    layers = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith("_proj.weight")}
    kind, made = getattr(torch, dtype), []
    for number in range(count):
        adapter = folder / f"rank-{rank}-{dtype}-{number}"
        made.append(adapter)
        if (adapter / "adapter_config.json").exists():
            continue
        adapter.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for layer, (num_outputs, num_inputs) in layers.items():
            a = torch.randn(rank, num_inputs, generator=generator) * DEVIATION
            b = torch.randn(num_outputs, rank, generator=generator) * DEVIATION
            tensors[f"base_model.model.{layer}.lora_A.weight"] = a.to(kind)
            tensors[f"base_model.model.{layer}.lora_B.weight"] = b.to(kind)
        save_file(tensors, adapter / "adapter_model.safetensors")
        targets = sorted({layer.rsplit(".", 1)[1] for layer in layers})
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets,
            "bias": "none", "base_model_name_or_path": "",
        }  # fmt: skip
        (adapter / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return made
