"""What the layers of a model need, group by group: memory, and a backend that can read it.

Derived from the declaration of a model, before weights are loaded. worker.py determines the number of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ratoon.attention.interface import AttentionNeeds
from ratoon.attention.select import BackendChoice, select_backend
from ratoon.core.kv import AttachedGroup, KVCacheGroup, divide_states, group_layers
from ratoon.execution.kv.kv_tensors import dtype_name
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer, StateSpaceLayer
from ratoon.models.base import LanguageModel

Layers = Sequence[AttentionLayer | CrossAttentionLayer | StateSpaceLayer]


@dataclass(frozen=True, slots=True)
class Geometry:
    groups: tuple[KVCacheGroup, ...]  # those whose tables grow with the sequence
    cross: KVCacheGroup | None
    choices: list[BackendChoice]  # for each of `groups`, then for `cross`
    encoder_choice: BackendChoice | None  # for the attention of an encoder to its own input
    attached: tuple[AttachedGroup, ...] = ()  # of the model that drafts
    attached_choices: Sequence[BackendChoice] = ()  # for each of `attached`

    @property
    def all_choices(self) -> list[BackendChoice]:
        own = self.choices if self.encoder_choice is None else [*self.choices, self.encoder_choice]
        return [*own, *self.attached_choices]


def geometry_of(
    model: LanguageModel,
    backend: str,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    encoder_may_round: bool = False,
    whole: LanguageModel | None = None,
    draft_layers: Sequence[AttentionLayer] = (),
    state_interval: int | None = None,
) -> Geometry:
    """`backend`: a name, or "auto". `kv_dtype`: that keys and values of the cache are kept in; None: `dtype`.
    `encoder_may_round`: the attention of an encoder may round to bf16. `whole`: the model with the layers of all
    stages, from which the groups of each stage are cut; None: `model` has all. `draft_layers`: those of a model that
    drafts beside it. `state_interval`: tokens between the checkpoints of states; None: the default.
    Raises ConfigError if no backend supports some layers of the model."""
    whole = whole or model

    def groups_of(layers: Layers, kept: torch.dtype = kv_dtype or dtype) -> tuple[KVCacheGroup, ...]:
        specs = [layer.kv_spec(block_size, dtype_name(kept)) for layer in layers]
        return group_layers(divide_states(specs, block_size, state_interval))

    def choose(what: str, every: Layers, group: KVCacheGroup, may_round: bool = False) -> BackendChoice:
        layers = [every[index] for index in group.layers]
        sees_ahead = every is own_layers and whole.config.sees_ahead
        needs = AttentionNeeds.of(layers, group.spec, device, dtype, batch_invariant, may_round, sees_ahead)
        return select_backend(backend, needs, f"{what} {_ranges(group.layers)} ({group.spec.growth})")

    own_layers = whole.memory_layers
    groups = groups_of(own_layers)
    cross = _only(groups_of(whole.cross_layers))
    encoder = _only(groups_of(model.encoder_attention_layers, dtype))  # a scratch cache: nothing is kept
    choices = [choose("layers", own_layers, group) for group in groups]
    if cross is not None:
        choices.append(choose("cross-attention of layers", whole.cross_layers, cross))
        cross = cross.cut(model.layer_range)
    own = None
    if encoder is not None:
        own = choose("encoder layers", model.encoder_attention_layers, encoder, encoder_may_round)
    table = table_of_drafts(groups)
    beside = groups_of(draft_layers)
    attached = tuple(AttachedGroup(group.spec, group.layers, table) for group in beside)
    attached_choices = [choose("draft layers", draft_layers, group) for group in beside]
    own_groups = tuple(group.cut(model.layer_range) for group in groups)
    return Geometry(own_groups, cross, choices, own, attached, attached_choices)


def table_of_drafts(groups: Sequence[KVCacheGroup]) -> int:
    """The group in whose blocks a model that drafts has its keys and values: the one that keeps the most of a text."""
    return max(range(len(groups)), key=lambda number: getattr(groups[number].spec, "window", float("inf")), default=0)


def _only(groups: tuple[KVCacheGroup, ...]) -> KVCacheGroup | None:
    assert len(groups) <= 1, "all layers of an encoder, or of cross-attention, need the same memory"
    return groups[0] if groups else None


def _ranges(layers: tuple[int, ...]) -> str:
    """0, 1, 2, 5 → "0-2, 5"."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
