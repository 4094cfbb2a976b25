"""Settings. Resolved once, by a pure function, and printed on request; nothing else invents a default."""

from __future__ import annotations

import enum
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ratoon.core.errors import ConfigError
from ratoon.core.params import MAX_HIDDEN_STATES_BYTES, MAX_LOGPROBS

MAX_ROOTS = 1024  # ended requests that can be continued, unless the engine's config sets another limit


class SchedulingPolicy(enum.StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How positions turn into angles. `kind` is default, linear, dynamic, llama3, yarn or longrope."""

    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # longrope: of sequences within the original length, and of longer ones
    long_factors: tuple[float, ...] = ()


class PositionKind(enum.StrEnum):
    """Where a model takes the order of tokens from."""

    ROTARY = "rotary"  # angles, computed for any position
    TABLE = "a table of vectors"  # one for each position that there is
    RELATIVE = "relative"  # a number for each distance


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The encoder beside a decoder. Its hidden size is the decoder's."""

    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int  # the most states that it makes of one input
    num_mel_bins: int | None = None  # set: it reads audio, always `max_position` states of 30 s, and not tokens


@dataclass(frozen=True, slots=True)
class RelativePositions:
    """T5's: attention scores get a number that depends on the distance, in buckets that widen with it."""

    num_buckets: int
    max_distance: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model, whatever its family and file format called these things. What has no prefix is the decoder's, or, of a
    model that has none, the encoder's."""

    architecture: str  # a key of the model registry, such as "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    position_kind: PositionKind = PositionKind.ROTARY
    norm_eps: float = 1e-6
    activation: str = "silu"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rotary_dim: int | None = None  # None: all of head_dim
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k, v
    attention_output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] | None = None  # which layers use the window; None: all, when there is one
    checkpoint_dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    causal: bool = True  # False: every token sees all others, so nothing is generated (BERT)
    encoder: EncoderConfig | None = None  # set: an encoder-decoder model
    relative_positions: RelativePositions | None = None
    scale_embedding: bool = False  # token embeddings are multiplied by the root of the hidden size
    num_token_types: int = 0  # BERT's segments, of which every text is the first
    gated_mlp: bool = False  # of a family that has both forms (T5)
    decoder_start_token_id: int | None = None  # what every decoder prompt begins with
    forced_bos_token_id: int | None = None  # what follows it, unless the caller's decoder prompt says otherwise
    suppressed_token_ids: tuple[int, ...] = ()  # never generated
    suppressed_first_token_ids: tuple[int, ...] = ()  # not as the first token

    def window_of_layer(self, layer: int) -> int | None:
        if self.sliding_window is None:
            return None
        if self.sliding_layers is not None and not self.sliding_layers[layer]:
            return None
        return self.sliding_window


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int = 16
    num_blocks: int | None = None  # None: as many as `memory_bytes` or `memory_fraction` allow
    memory_bytes: int | None = None  # for keys and values
    memory_fraction: float | None = None  # of what is free once the weights are loaded; None: fits the kind of device
    gpu_memory_utilization: float | None = None  # of all that a GPU has, for weights and blocks together; not on a CPU
    enable_prefix_caching: bool = True
    lease_fraction: float = 0.5  # of the pool's blocks that leases may hold together
    max_lease_seconds: float = 3600.0  # the longest that a request may ask for
    swap_bytes: int = 0  # host memory for the blocks of preempted branches; 0: they are computed again


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_batched_tokens: int = 2048  # token budget of a step
    max_num_seqs: int = 256  # branches in a step
    max_prefill_chunk: int | None = None  # longest part of one prompt in a step; None: the budget
    max_num_encoder_tokens: int = 16384  # budget of a step for encoder inputs; one that is longer runs alone
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    enable_chunked_prefill: bool = True
    whole_prompts: bool = False  # every token sees all others, so a sequence is computed in one step or not at all


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of one engine. `resolve` fills what was left open."""

    model: str
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    max_model_len: int | None = None
    attention_backend: str = "auto"
    num_threads: int | None = None  # CPU threads; None: the cores that this process may use
    seed: int = 0
    max_logprobs: int = MAX_LOGPROBS
    max_hidden_states_bytes: int = MAX_HIDDEN_STATES_BYTES  # that a request may ask for
    max_roots: int = MAX_ROOTS  # ended requests that can be continued
    load_format: str = "auto"  # auto, or dummy: random weights of the right shape
    hf_overrides: dict[str, Any] = field(default_factory=dict)  # in the place of what the model's config.json says
    executor: str = "uniproc"  # uniproc: one worker in the engine's process; or "module:Class" with the same interface
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def with_(self, **changes: Any) -> EngineConfig:
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit_to_model(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Settings that a model decides. Of one whose tokens see what comes after them, nothing can be computed in parts,
    and a prefix means nothing."""
    if model.causal:
        return config
    longest = resolve_max_model_len(config.max_model_len, model)
    budget = max(config.scheduler.max_num_batched_tokens, longest)
    scheduler = replace(
        config.scheduler, enable_chunked_prefill=False, whole_prompts=True, max_num_batched_tokens=budget
    )
    return replace(config, scheduler=scheduler, cache=replace(config.cache, enable_prefix_caching=False))


def resolve_max_model_len(asked: int | None, model: ModelConfig) -> int:
    """The longest sequence: what was asked for, if the model can do it."""
    if asked is None:
        return model.max_position
    if asked < 1:
        raise ConfigError("max_model_len", f"{asked} is out of range", "at least 1")
    if asked > longest_model_len(model):
        raise _too_long(asked, model)
    return asked


def longest_model_len(model: ModelConfig) -> int:
    """How far the positions reach: the model's own number, or what its rope scaling makes of the original length."""
    scaling = model.rope_scaling
    if model.position_kind != PositionKind.ROTARY or scaling.kind == "default":
        return model.max_position
    original = scaling.original_max_position or model.max_position
    return max(model.max_position, int(original * scaling.factor))


def _too_long(asked: int, model: ModelConfig) -> ConfigError:
    problem = f"{asked} is more than the model's {model.max_position} positions"
    scaling = model.rope_scaling
    expected = "lower it or leave it out"
    if model.position_kind == PositionKind.TABLE:
        problem += ", each of which is a vector in its weights"
    elif model.position_kind == PositionKind.RELATIVE:
        expected += f', or allow more: hf_overrides={{"n_positions": {asked}}}'
    elif scaling.kind == "default":
        factor = math.ceil(asked / model.max_position)
        expected += f', or stretch them: rope_scaling={{"rope_type": "yarn", "factor": {factor}.0}}'
    else:
        problem = (
            f"{asked} is more than the {longest_model_len(model)} positions that rope scaling {scaling.kind!r} with "
            f"factor {scaling.factor:g} reaches"
        )
        expected += ", or set a larger factor with rope_scaling"
    return ConfigError("max_model_len", problem, expected)


def verify_engine_config(config: EngineConfig) -> None:
    """Raise ConfigError for settings that contradict themselves, before anything is loaded."""
    cache, scheduler = config.cache, config.scheduler
    _at_least("block_size", cache.block_size, 1)
    _at_least("max_num_batched_tokens", scheduler.max_num_batched_tokens, 1)
    _at_least("max_num_seqs", scheduler.max_num_seqs, 1)
    _at_least("max_num_encoder_tokens", scheduler.max_num_encoder_tokens, 1)
    _at_least("swap_memory", cache.swap_bytes, 0)
    if scheduler.max_prefill_chunk is not None:
        _at_least("max_prefill_chunk", scheduler.max_prefill_chunk, 1)
    if cache.num_blocks is not None:
        _at_least("num_blocks", cache.num_blocks, 2)
    if config.num_threads is not None:
        _at_least("num_threads", config.num_threads, 1)
    if cache.memory_fraction is not None and not 0 < cache.memory_fraction <= 1:  # NaN is not above 0 either
        raise ConfigError("kv_memory_fraction", f"{cache.memory_fraction} is out of range", "above 0 and at most 1")
    utilization = cache.gpu_memory_utilization
    if utilization is not None and not 0 < utilization <= 1:
        raise ConfigError("gpu_memory_utilization", f"{utilization} is out of range", "above 0 and at most 1")
    if utilization is not None and cache.memory_fraction is not None:
        raise ConfigError("gpu_memory_utilization", "and kv_memory_fraction contradict each other", "one of the two")
    if not 0 <= cache.lease_fraction <= 1:
        raise ConfigError("lease_fraction", f"{cache.lease_fraction} is out of range", "0 (no leases) to 1")
    if not cache.max_lease_seconds > 0:
        raise ConfigError("max_lease_seconds", f"{cache.max_lease_seconds} is out of range", "more than 0")
    _at_least("max_hidden_states_bytes", config.max_hidden_states_bytes, 1)
    _at_least("max_roots", config.max_roots, 0)
    if config.dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ConfigError("dtype", f"{config.dtype!r} is unknown", "auto, float32, bfloat16 or float16")
    if config.load_format not in ("auto", "dummy"):
        raise ConfigError("load_format", f"{config.load_format!r} is unknown", "auto or dummy")


def _at_least(field_name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(field_name, f"{value!r} is out of range", f"a whole number of at least {low}")
