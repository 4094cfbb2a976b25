"""The parts of a worker for drafts on the device: what the settings name is opened, declared, and built beside the
model. What can't work is refused before memory is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ConfigError
from ratoon.execution.drafting.draft_head import HeadDrafter
from ratoon.execution.drafting.draft_model import DraftModel
from ratoon.execution.drafting.drafting import Drafting
from ratoon.execution.drafting.drawn import DrawnDrafts
from ratoon.execution.drafting.interface import Drafter, Inputs
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.kv.kv_tensors import LayerCaches
from ratoon.layers.attention import AttentionLayer
from ratoon.layers.ops import Ops
from ratoon.layers.shard import ModelPart
from ratoon.layers.weights import TensorSource
from ratoon.models.base import LanguageModel
from ratoon.models.build import build_model, count_weights, declare_model
from ratoon.models.draft_head import DraftHead, with_window
from ratoon.models.head_source import DraftHeadSource, build_draft_head, declare_draft_head, open_draft_head
from ratoon.models.source import resolve_model

SETTING = "speculate"
BuiltDraft = LanguageModel | DraftHead


class DraftParts(Protocol):
    """What drafts, before it is built."""

    tensors: TensorSource
    layers: Sequence[AttentionLayer]  # those of its attention
    num_weights: int

    def build(self, target: LanguageModel, ops: Ops, device: torch.device, dtype: torch.dtype) -> BuiltDraft:
        """With its weights. `target` is the model that it drafts for."""
        ...


def open_draft(
    kind: str, name: str, target: ModelConfig, declaration: LanguageModel, max_model_len: int, part: ModelPart
) -> DraftParts:
    """`kind` and `name`: "draft" and a model, or "head" and a folder. `declaration`: the model that it drafts for, on
    the meta device. A draft is cut as the model is. Raises ConfigError or ModelError."""
    shown = f"{kind}:{name}"
    if part.stage.count > 1:
        problem = f"{shown} needs the tokens and states of the last stage, and a pipeline has {part.stage.count}"
        raise ConfigError(SETTING, problem, "ngram or roots, or pipeline_parallel_size 1")
    if target.encoder is not None or not target.generates:
        raise ConfigError(SETTING, f"{shown} is for decoders alone, and the model has an encoder", "ngram, or off")
    windows = [target.window_of_layer(layer) for layer in range(target.num_layers)]
    # Blocks of a text before the widest window are given back, and with them what a draft has there
    window = None if None in windows else max(window for window in windows if window is not None)
    if kind == "head":
        return HeadParts(open_draft_head(name, target), declaration, max_model_len, part, window)
    return ModelParts(name, target, max_model_len, part, window)


@dataclass(slots=True)
class ModelParts:
    """A smaller model of the same vocabulary."""

    config: ModelConfig
    tensors: TensorSource
    layers: Sequence[AttentionLayer]
    num_weights: int
    max_model_len: int
    part: ModelPart

    def __init__(self, name: str, target: ModelConfig, max_model_len: int, part: ModelPart, window: int | None) -> None:
        source = resolve_model(name)
        config = source.config
        if config.encoder is not None or not config.generates:
            raise ConfigError(SETTING, f"draft:{name} is no decoder", "a smaller model of the same family")
        if config.vocab_size != target.vocab_size:
            problem = f"draft:{name} has a vocabulary of {config.vocab_size:,} tokens"
            expected = f"a model with the {target.vocab_size:,} tokens of the model that it drafts for"
            raise ConfigError(SETTING, problem, expected)
        if config.max_position < max_model_len:
            problem = f"draft:{name} has {config.max_position:,} positions, and max_model_len is {max_model_len:,}"
            raise ConfigError(SETTING, problem, f"a max_model_len of at most {config.max_position:,}")
        if window is not None:
            own = config.sliding_window
            config = replace(config, sliding_window=window if own is None else min(own, window), sliding_layers=None)
        self.config, self.tensors, self.max_model_len, self.part = config, source.tensors, max_model_len, part
        self.layers = declare_model(config, max_model_len, part).attention_layers
        self.num_weights = count_weights(config, source.tensors, part)

    def build(self, target: LanguageModel, ops: Ops, device: torch.device, dtype: torch.dtype) -> BuiltDraft:
        return build_model(self.config, self.tensors, ops, device, dtype, self.max_model_len, self.part)


@dataclass(slots=True)
class HeadParts:
    """A head that reads hidden states."""

    source: DraftHeadSource
    tensors: TensorSource
    layers: Sequence[AttentionLayer]
    num_weights: int
    max_model_len: int
    part: ModelPart

    def __init__(
        self,
        source: DraftHeadSource,
        declaration: LanguageModel,
        max_model_len: int,
        part: ModelPart,
        window: int | None,
    ) -> None:
        self.source = replace(source, config=with_window(source.config, window))
        self.tensors, self.max_model_len, self.part = source.tensors, max_model_len, part
        self.layers = declare_draft_head(self.source, declaration, part.shard).attention_layers
        self.num_weights = sum(torch.Size(shape).numel() for shape in source.tensors.shapes().values())

    def build(self, target: LanguageModel, ops: Ops, device: torch.device, dtype: torch.dtype) -> BuiltDraft:
        return build_draft_head(self.source, target, ops, device, dtype, self.max_model_len, self.part.shard)


def make_drafting(
    draft: BuiltDraft,
    caches: LayerCaches,
    table: int,
    inputs: Inputs,
    branches: InputBatch,
    num_layers: int,
    token_memory: torch.Tensor | None = None,
    record: bool = False,
    drawn: DrawnDrafts | None = None,
) -> Drafting:
    """`caches`: those of the draft's layers, in the blocks of the KV group `table`; `num_layers`: of the model that it
    drafts for. `token_memory`: that of the branches, where it lies on the device. `record`: small passes of a model are
    recorded. `drawn`: draws the drafts; None: they are the likeliest tokens."""
    drafter: Drafter
    if isinstance(draft, DraftHead):
        drafter = HeadDrafter(draft, caches, table, inputs, branches, num_layers, token_memory)
    else:
        drafter = DraftModel(draft, caches, table, inputs, record)
    return Drafting(drafter, branches, table, token_memory, drawn)
