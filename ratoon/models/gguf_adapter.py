"""Adapters in GGUF files, as llama.cpp's converter writes them.

Layers have llama.cpp's names there, and the rows of queries and keys its order, both of which gguf_source.py undoes
for models.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError
from ratoon.models.adapter_parts import LowRankPart
from ratoon.models.damage import show
from ratoon.models.gguf_file import GGUFFile
from ratoon.models.gguf_names import ARCHITECTURES, LLAMA_NAMES, NAMES
from ratoon.models.gguf_source import PERMUTED, restore_rotary_halves

if TYPE_CHECKING:
    import torch

HEADS_OF = {"attn_q": "num_heads", "attn_k": "num_kv_heads"}  # whose rows are reordered: fields of a ModelConfig


class GGUFAdapter:
    """Implements AdapterFile."""

    def __init__(self, path: Path, config: ModelConfig | None = None) -> None:
        self.name = str(path)
        self._config = config
        self._file = file = GGUFFile(path)
        self._verify("general.type", "adapter", "a file of an adapter, not of a model")
        self._verify("adapter.type", "lora", "lora: other kinds of adapters are not supported")
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            problem = f"is of the unknown architecture {show(self.architecture)}"
            raise ModelError(self.name, problem, f"known in GGUF: {', '.join(sorted(ARCHITECTURES))}")
        alpha = file.metadata.get("adapter.lora.alpha")
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < 1e30:
            raise ModelError(self.name, f"has {show(alpha)} as the metadata key adapter.lora.alpha", "a number above 0")
        self._tensors: dict[str, dict[str, str]] = {}  # by the layer: lora_a and lora_b
        for name in file.tensors:
            layer, matrix = self._layer_of(name)
            self._tensors.setdefault(layer, {})[matrix] = name
        self.saved: dict[str, tuple[int, ...]] = {}
        self.parts = {layer: self._part(layer, float(alpha)) for layer in self._tensors}
        if not self.parts:
            raise ModelError(self.name, "has no tensors", "an adapter converted by llama.cpp")

    def read(self, layer: str) -> tuple[torch.Tensor, torch.Tensor]:
        names = self._tensors[layer]
        a, b = (self._file.read(names[matrix]).floats() for matrix in ("lora_a", "lora_b"))
        field = HEADS_OF.get(names["lora_b"].split(".")[-3])
        if self.architecture not in PERMUTED or field is None:
            return a, b
        assert self._config is not None, "the order of rows depends on the model's heads"
        return a, restore_rotary_halves(b, len(b) // getattr(self._config, field))

    def read_saved(self, layer: str) -> torch.Tensor:
        raise KeyError(layer)

    def _verify(self, key: str, expected: str, said: str) -> None:
        found = self._file.metadata.get(key)
        if found != expected:
            raise ModelError(self.name, f"has {show(found)} as the metadata key {key}", said)

    def _layer_of(self, name: str) -> tuple[str, str]:
        names = NAMES.get(self.architecture, LLAMA_NAMES)
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight\.(lora_[ab])", name)
        if match is None or match[2] not in names or ("{}" in names[match[2]]) != (match[1] is not None):
            raise ModelError(
                self.name, f"has the tensor {show(name)}, whose meaning is unknown", "lora_a and lora_b alone"
            )
        if match[2] == "token_embd":
            raise ModelError(self.name, "adapts the table of tokens", "linear layers; or the adapter as PEFT saved it")
        return names[match[2]].format(match[1]), match[3]

    def _part(self, layer: str, alpha: float) -> LowRankPart:
        names = self._tensors[layer]
        if len(names) != 2:
            raise ModelError(self.name, f"has one of lora_a and lora_b for {show(layer)}", "both")
        a, b = (self._file.tensors[names[matrix]].shape for matrix in ("lora_a", "lora_b"))
        part = LowRankPart.of_shapes(self.name, layer, a, b, alpha, is_rank_stable=False)
        return part._replace(may_be_transposed=self.architecture == "gpt2")
