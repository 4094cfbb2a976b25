"""Where draft heads come from: reads their folders, and builds them for a model.

A folder has a config.json and safetensors. Loading is strict: nothing missing, nothing left over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError
from ratoon.layers.ops import Ops
from ratoon.layers.shard import Shard
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import TensorSource, Weights
from ratoon.models.base import LanguageModel
from ratoon.models.config_fields import ConfigFields
from ratoon.models.draft_head import DraftHead, DraftHeadConfig
from ratoon.models.eagle3 import Eagle3Head
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.hub import HUB_ID, download
from ratoon.models.multi_token import MultiTokenHead
from ratoon.models.safetensors_source import SafetensorsSource
from ratoon.models.tokenizer import read_json

META = torch.device("meta")
EXPECTED = "a folder with config.json and safetensors, of an EAGLE-3 head or of a multi-token prediction module"
LAYER_FAMILY = "LlamaForCausalLM"  # whose config has the fields of a head's layer
KINDS = {"eagle3": Eagle3Head, "mtp": MultiTokenHead}


@dataclass(frozen=True, slots=True)
class DraftHeadSource:
    config: DraftHeadConfig
    tensors: TensorSource


def open_draft_head(name: str, target: ModelConfig) -> DraftHeadSource:
    """Find a head by its folder or hub id, and read its config. Raises ModelError if it is no head, or not one of a
    model like `target`."""
    folder = Path(name).expanduser()
    if not folder.is_dir() and HUB_ID.fullmatch(name) and not name.startswith("."):
        folder = download(name, EXPECTED)
    if not (folder / "config.json").is_file():
        raise ModelError(name, "has no config.json" if folder.is_dir() else "is no folder", EXPECTED)
    config = parse_head_config(read_json(folder / "config.json"), str(folder), target)
    return DraftHeadSource(config, SafetensorsSource(folder))


def parse_head_config(raw: Mapping[str, Any], source: str, target: ModelConfig) -> DraftHeadConfig:
    """`source` is for messages: the folder that the config came from."""
    names = raw.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    kind = _kind_of(architecture)
    if kind is None:
        raise ModelError(source, f"is of the architecture {architecture!r}, which is no draft head", EXPECTED)
    layer = parse_hf_config({**raw, "architectures": [LAYER_FAMILY]}, source)
    fields = ConfigFields(raw, source)
    if layer.vocab_size != target.vocab_size:
        problem = f"has a vocabulary of {layer.vocab_size:,} tokens, and the model one of {target.vocab_size:,}"
        raise ModelError(source, problem, "a head that was trained for this model")
    if layer.num_layers != 1:
        raise ModelError(source, f"has {layer.num_layers} layers", "a head of one layer")
    target_size = fields.count("target_hidden_size", target.hidden_size)
    if target_size != target.hidden_size:
        problem = f"reads hidden states of {target_size} numbers, and those of the model have {target.hidden_size}"
        raise ModelError(source, problem, "a head that was trained for this model")
    reads = (target.num_layers + 1,) if kind == "mtp" else _eagle3_layers(fields, target.num_layers)
    draft_vocab_size = fields.count("draft_vocab_size", layer.vocab_size, most=layer.vocab_size)
    return DraftHeadConfig(kind, layer, draft_vocab_size, reads, target.hidden_size)


def _kind_of(architecture: str) -> str | None:
    if "Eagle3" in architecture:
        return "eagle3"
    return "mtp" if architecture.endswith(("MTP", "MTPModel", "NextN")) else None


def _eagle3_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer. Files name the layers whose outputs are read, counted from 0."""
    below = fields.below("eagle_config")
    listed = below.raw.get("eagle_aux_hidden_state_layer_ids")
    if listed is None:
        return tuple(min(max(layer, 0), num_layers) for layer in (2, num_layers // 2, num_layers - 3))
    is_list = isinstance(listed, list) and listed and all(type(layer) is int for layer in listed)
    if not is_list or not all(-1 <= layer < num_layers for layer in listed):
        expected = f"a list of layers, 0 to {num_layers - 1}"
        raise below.wrong("eagle_aux_hidden_state_layer_ids", f"is {listed!r}", expected)
    return tuple(layer + 1 for layer in listed)


# ---- how they are built ----


def build_draft_head(
    source: DraftHeadSource,
    target: LanguageModel,
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    max_position: int,
    shard: Shard | None = None,
) -> DraftHead:
    """The head with its weights, cut as those of the model are. Files that do not match their config raise ModelError
    before any tensor is read. Embeddings and output head are the model's where the files have none."""
    comparison = Weights(source.tensors, TorchOps(), META, dtype, shard)
    KINDS[source.config.kind](source.config, comparison, max_position, target)
    comparison.check_nothing_left()
    weights = Weights(source.tensors, ops, device, dtype, shard)
    return KINDS[source.config.kind](source.config, weights, max_position, target)


def declare_draft_head(source: DraftHeadSource, target: LanguageModel, shard: Shard | None = None) -> DraftHead:
    """The head on the meta device: what its layer needs, before memory is allocated."""
    weights = Weights(source.tensors, TorchOps(), META, torch.float32, shard)
    return KINDS[source.config.kind](source.config, weights, 1, target)
