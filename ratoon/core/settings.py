"""Settings as people write them (keywords, "2GiB", "fcfs") to an EngineConfig. One list, for every way to an engine."""

from __future__ import annotations

import json
from typing import Any, Unpack

from ratoon.core.config import CacheConfig, EngineConfig, SchedulerConfig, SchedulingPolicy, verify_engine_config
from ratoon.core.errors import ConfigError
from ratoon.core.sizes import parse_size
from ratoon.core.suggestions import unknown_keyword
from ratoon.core.vllm_names import VllmSettings, translate

# Keywords of LLM and AsyncLLM that are not about the engine; a mistyped one ends up here.
FURTHER_KEYWORDS = (
    "skip_tokenizer", "seed", "process", "num_replicas", "startup_timer", "disable_log_stats", "otlp_traces_endpoint",
)  # fmt: skip


class EngineSettings(VllmSettings, total=False):
    """What can be set about an engine. What is left out is chosen to fit the model and the machine."""

    device: str  # auto, cpu, cuda, cuda:N
    dtype: str  # auto, float32, bfloat16, float16
    max_model_len: int | None  # longest sequence, prompt and answer together
    block_size: int  # tokens in a block of the KV cache
    num_blocks: int | None
    kv_memory: int | str | None  # bytes, or text such as "2GiB"
    kv_memory_fraction: float | None
    swap_memory: int | str  # host memory for what preempted requests hold; 0: they are computed again
    enable_prefix_caching: bool
    lease_fraction: float  # of the KV cache that is kept for continuations, at most
    max_lease_seconds: float  # the longest that a request may ask for
    max_num_batched_tokens: int  # token budget of a step
    max_num_seqs: int  # sequences in a step
    max_prefill_chunk: int | None
    max_num_encoder_tokens: int  # the same for encoder inputs
    enable_chunked_prefill: bool
    policy: SchedulingPolicy | str  # fcfs or priority
    num_threads: int | None  # CPU threads
    attention_backend: str
    max_logprobs: int
    max_hidden_states_bytes: int | str  # that a request may ask for
    max_roots: int  # ended requests that can be continued; of the owner with most of them the oldest are forgotten
    load_format: str  # auto, or dummy: random weights of the right shape
    executor: str  # uniproc, or "module:Class"
    hf_overrides: dict[str, Any] | str | None  # in the place of what config.json says: an object, or its JSON
    rope_scaling: dict[str, Any] | str | None  # one of them: {"rope_type": "yarn", "factor": 4.0} stretches positions


_CACHE_NAMES = {"block_size": "block_size", "num_blocks": "num_blocks", "kv_memory": "memory_bytes",
                "kv_memory_fraction": "memory_fraction",
                "gpu_memory_utilization": "gpu_memory_utilization", "swap_memory": "swap_bytes",
                "enable_prefix_caching": "enable_prefix_caching", "lease_fraction": "lease_fraction",
                "max_lease_seconds": "max_lease_seconds"}  # fmt: skip
_SCHEDULER_NAMES = ("max_num_batched_tokens", "max_num_seqs", "max_prefill_chunk", "max_num_encoder_tokens",
                    "enable_chunked_prefill", "policy")  # fmt: skip


def engine_config(model: str, **settings: Unpack[EngineSettings]) -> EngineConfig:
    """The checked config. ConfigError names the setting that is wrong; TypeError one that does not exist."""
    given: dict[str, Any] = dict(settings)
    unknown = sorted(given.keys() - EngineSettings.__annotations__.keys())
    if unknown:
        raise unknown_keyword("the engine", unknown[0], [*EngineSettings.__annotations__, *FURTHER_KEYWORDS])
    given = translate(model, given)
    for name in ("kv_memory", "swap_memory", "max_hidden_states_bytes"):
        if given.get(name) is not None:
            given[name] = parse_size(name, given[name], least=0 if name == "swap_memory" else 1)
    given["hf_overrides"] = _overrides(given.pop("hf_overrides", None), given.pop("rope_scaling", None))
    if "policy" in given:
        given["policy"] = _parse_policy(given["policy"])
    cache = CacheConfig(**{_CACHE_NAMES[name]: given.pop(name) for name in list(given) if name in _CACHE_NAMES})
    scheduler = SchedulerConfig(**{name: given.pop(name) for name in list(given) if name in _SCHEDULER_NAMES})
    config = EngineConfig(model=model, cache=cache, scheduler=scheduler, **given)
    verify_engine_config(config)
    return config


def _parse_policy(policy: SchedulingPolicy | str) -> SchedulingPolicy:
    try:
        return SchedulingPolicy(policy)
    except ValueError:
        names = " or ".join(known.value for known in SchedulingPolicy)
        raise ConfigError("policy", f"{policy!r} is unknown", names) from None


def _overrides(overrides: Any, rope_scaling: Any) -> dict[str, Any]:
    found = _json_object("hf_overrides", overrides)
    rope = _json_object("rope_scaling", rope_scaling)
    return {**found, "rope_scaling": rope} if rope else found


def _json_object(field: str, value: Any) -> dict[str, Any]:
    expected = 'an object, such as {"rope_type": "yarn", "factor": 4.0}'
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(field, f"is no JSON: {error}", expected) from None
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError(field, f"{value!r} is not an object", expected)
    return value
