"""The fingerprint of this engine's KV blocks: what must be equal for their bytes to be of use to another one."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.core.kv import KVCacheConfig, KVFingerprint, lay_out_pages
from ratoon.core.media import MediaConfig
from ratoon.execution.kv.geometry import Geometry
from ratoon.layers.ops import Ops
from ratoon.layers.rotary import uses_long_factors
from ratoon.layers.shard import WHOLE_MODEL, ModelPart
from ratoon.layers.weights import TensorSource
from ratoon.models.digest import digest_of_weights


def fingerprint_of(
    kv_config: KVCacheConfig,
    geometry: Geometry,
    tensors: TensorSource,
    dtype: str,
    draft_tensors: TensorSource | None = None,
    part: ModelPart = WHOLE_MODEL,
    config: ModelConfig | None = None,
    arithmetic: Sequence[str] = (),
) -> KVFingerprint:
    """`dtype`: in which the model computes. `draft_tensors`: those of the model that drafts, if there is one. `part`:
    what this worker has of the model; ranks of equal sizes have blocks of equal layout and different content.
    `config`: of the model, with what a user changed in it, such as rope. `arithmetic`: see `arithmetic_of`."""
    specs = [*(group.spec for group in kv_config.all_groups), *(group.spec for group in kv_config.attached)]
    choices = [*geometry.choices, *geometry.attached_choices]
    shapes = [choice.backend.page_shapes(spec) for choice, spec in zip(choices, specs, strict=True)]
    sources = [tensors] if draft_tensors is None else [tensors, draft_tensors]
    return KVFingerprint(
        weights=" ".join([*map(digest_of_weights, sources), _digest_of_config(config)]),
        dtype=dtype,
        arithmetic=tuple(arithmetic),
        specs=tuple(map(repr, specs)),
        layout=lay_out_pages(kv_config.all_groups, kv_config.attached),
        page_orders=tuple(f"{choice.backend.name} {shape}" for choice, shape in zip(choices, shapes)),
        part=name_of_part(part),
    )


def arithmetic_of(
    config: EngineConfig, model_config: ModelConfig, max_model_len: int, ops: Ops, on_cpu: bool
) -> list[str]:
    """Lists what changes the numbers of keys and values beside weights and dtype. `ops` has the model's weights."""
    found = sorted({f"weights in {one['format']}" for one in ops.kept_formats()})
    if model_config.encoder is not None or model_config.media is not None:
        found.append(_arithmetic_of_encoders(config))
    if config.batch_invariant and not on_cpu:  # there it is always so
        found.append("the same bits in any batch")
    if model_config.rope_scaling.kind == "longrope":
        is_long = uses_long_factors(model_config, max_model_len)
        found.append(f"{'long' if is_long else 'short'} factors of frequencies")
    return found


def _arithmetic_of_encoders(config: EngineConfig) -> str:
    """Products and attention of encoders are rounded as this setting says, even where no weight is quantised."""
    return f"encoder with quantization {config.quantization}"


def name_of_part(part: ModelPart) -> str:
    """The rank and the stage of a worker among all of them; empty for the only one."""
    shard, stage = part.shard, part.stage
    if shard.world_size == stage.count == 1:
        return ""
    return f"rank {shard.rank} of {shard.world_size}, stage {stage.index} of {stage.count}"


def fingerprint_of_encoder(
    tensors: TensorSource, dtype: str, model_config: ModelConfig, world_size: int, config: EngineConfig
) -> KVFingerprint:
    """The kind of what an encoder of media makes: rows of embeddings. Ranks have equal ones."""
    spec = f"rows of an encoder, {model_config.hidden_size} wide, made by one of {world_size} ranks"
    arithmetic = (_arithmetic_of_encoders(config),)
    weights = f"{digest_of_weights(tensors)} {_digest_of_config(model_config.media)}"
    return KVFingerprint(weights=weights, dtype=dtype, arithmetic=arithmetic, specs=(spec,))


def _digest_of_config(config: ModelConfig | MediaConfig | None) -> str:
    return blake2b(repr(config).encode(), digest_size=8).hexdigest()
