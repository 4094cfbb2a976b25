"""Adapters with random matrices in PEFT's form, for models of any shape, without PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

MODULES = ("q_proj", "v_proj", "down_proj")


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    seed: int = 0,
    rank: int = 4,
    size: float = 0.5,
    *,
    acts: bool = True,  # False: answers are those of the model alone
) -> Path:
    """`shapes`: of the model's tensors. The matrices are large enough for answers to differ."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in MODULES:
            num_outputs, num_inputs = shape
            prefix = f"base_model.model.{layer}"
            tensors[f"{prefix}.lora_A.weight"] = random.normal(0, size, (rank, num_inputs)).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = random.normal(0, size * acts, (num_outputs, rank)).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(MODULES), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
