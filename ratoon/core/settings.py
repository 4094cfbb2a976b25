"""Builds configs from settings as users write them (keywords, "2GiB", "fcfs"). Declared in core/config.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratoon.core.config import (
    OF_HOST,
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    FrontEndConfig,
    MediaSettings,
    SchedulerConfig,
    verify_engine_config,
)
from ratoon.core.errors import ConfigError
from ratoon.core.setting import Setting, json_object, settings_of, verify_settings
from ratoon.core.speculation import SpeculationConfig
from ratoon.core.suggestions import unknown_keyword
from ratoon.core.vllm_names import VLLM_NAMES, translate

# An entry of hf_overrides that is also a setting.
ROPE_SCALING = Setting(
    "hf_overrides", "rope_scaling", 'stretch positions: {"rope_type": "yarn", "factor": 4.0}', {}, dict
)
PARTS = (CacheConfig, SchedulerConfig, SpeculationConfig, AdapterConfig, MediaSettings)
ENGINE_SETTINGS = (*settings_of(EngineConfig), ROPE_SCALING, *(one for part in PARTS for one in settings_of(part)))
FRONT_END_SETTINGS = settings_of(FrontEndConfig)


def engine_config(model: str, **settings: Any) -> EngineConfig:
    """The checked config. ConfigError names the setting that is wrong; TypeError one that does not exist."""
    names = [setting.name for setting in ENGINE_SETTINGS]
    known = {*names, *VLLM_NAMES}
    for name in settings:
        if name not in known:
            raise unknown_keyword("the engine", name, [*names, *(one.name for one in FRONT_END_SETTINGS), "process"])
    given = translate(model, settings)
    rope_scaling = json_object("rope_scaling", given.pop("rope_scaling", None))
    overrides = json_object("hf_overrides", given.pop("hf_overrides", None))
    config = EngineConfig(
        model=model,
        cache=CacheConfig(**_values(CacheConfig, given)),
        scheduler=SchedulerConfig(**_values(SchedulerConfig, given)),
        speculation=SpeculationConfig(**_values(SpeculationConfig, given)),
        adapters=AdapterConfig(**_values(AdapterConfig, given)),
        media=MediaSettings(**_values(MediaSettings, given)),
        hf_overrides={**overrides, "rope_scaling": rope_scaling} if rope_scaling else overrides,
        **_values(EngineConfig, given),
    )
    verify_engine_config(config)
    return config


def values_of(config: EngineConfig) -> dict[str, Any]:
    """All settings of an engine by their names."""
    kinds: dict[type, Any] = {
        EngineConfig: config,
        CacheConfig: config.cache,
        SchedulerConfig: config.scheduler,
        SpeculationConfig: config.speculation,
        AdapterConfig: config.adapters,
        MediaSettings: config.media,
    }
    return {one.name: getattr(part, one.field) for kind, part in kinds.items() for one in settings_of(kind)}


def changed_values(config: EngineConfig) -> dict[str, Any]:
    """Returns the settings that are not at their defaults."""
    usual = values_of(EngineConfig(config.model))
    return {name: value for name, value in values_of(config).items() if value != usual[name]}


def configure(model: str, settings: Mapping[str, Any]) -> tuple[FrontEndConfig, EngineConfig]:
    """The checked configs of LLM and AsyncLLM: settings of the front end; all others are the engine's."""
    left = dict(settings)
    if left.pop("skip_tokenizer_init", False):  # vLLM's name
        left["skip_tokenizer"] = True
    size = left.pop("data_parallel_size", None)  # vLLM's name, too
    if size is not None and left.setdefault("num_replicas", size) != size:
        raise ConfigError("data_parallel_size", "and num_replicas are the same setting", "one of the two")
    own = {setting.name: left.pop(setting.name) for setting in FRONT_END_SETTINGS if setting.name in left}
    front_end = FrontEndConfig(**_values(FrontEndConfig, own))
    verify_settings(front_end)
    if front_end.adapters and left.setdefault("enable_lora", True) is False:
        raise ConfigError("enable_lora", "contradicts adapters, which are named", "True, or no adapters")
    engine = engine_config(model, **left)
    _verify_host(front_end, engine)
    total = front_end.max_total_hidden_states_bytes
    if total is None or total >= engine.max_hidden_states_bytes:
        return front_end, engine
    if "max_hidden_states_bytes" in left:  # set explicitly: such requests could never be served
        raise ConfigError(
            "max_total_hidden_states_bytes",
            f"{total} bytes are less than one request may ask for "
            f"(max_hidden_states_bytes, {engine.max_hidden_states_bytes})",
            "at least as many",
        )
    return front_end, engine.with_(max_hidden_states_bytes=total)


def _verify_host(front_end: FrontEndConfig, engine: EngineConfig) -> None:
    if engine.node_rank:
        problem = f"node {engine.node_rank} has no engine: it runs ranks for that of node 0"
        raise ConfigError(
            "node_rank", problem, f"0 here; `ratoon serve MODEL --node-rank {engine.node_rank}` runs them"
        )
    if engine.nnodes > 1 and front_end.num_engines > 1:
        problem = f"{front_end.num_engines} engines can't share the hosts of one"
        raise ConfigError("num_replicas", problem, "1, or nnodes 1")
    _verify_moves(front_end, engine)


def _verify_moves(own: FrontEndConfig, engine: EngineConfig) -> None:
    """Raise ConfigError for settings that contradict that engines send each other blocks."""
    if bool(own.prefill_engines) != bool(own.decode_engines):
        lacking, given = ("decode", "prefill") if own.prefill_engines else ("prefill", "decode")
        problem = f"0 is out of range beside {given}_engines {own.prefill_engines or own.decode_engines}"
        raise ConfigError(f"{lacking}_engines", problem, "at least 1")
    if own.prefill_engines and own.num_replicas > 1:
        raise ConfigError("num_replicas", "and prefill_engines both say how many engines there are", "one of the two")
    if own.encode_engines and engine.num_ranks > 1:
        problem = f"an engine that only encodes can't be {engine.num_ranks} ranks"
        raise ConfigError("encode_engines", problem, "leave it out, or have one rank")
    if not own.moves_blocks:
        return
    name = "prefill_engines" if own.prefill_engines else "encode_engines" if own.encode_engines else "move_roots"
    cache = engine.cache
    has_other = cache.kv_connector is not None and not cache.moves_blocks
    has_far_ranks = engine.num_ranks > 1 and engine.executor not in OF_HOST
    problems = {
        "engines that step together (data_parallel_lockstep) are alike": engine.data_parallel_lockstep,
        "the caller chooses engines (data_parallel_external_lb)": own.data_parallel_external_lb,
        f"the ranks of executor {engine.executor!r} are not processes of this host": has_far_ranks,
        f"kv_connector {cache.kv_connector!r} moves no blocks between engines": has_other,
        "blocks pass through host memory (preemption_mode recompute)": cache.preemption_mode == "recompute",
        "blocks are found by hashes of prefixes (enable_prefix_caching)": not cache.enable_prefix_caching,
    }
    for problem, is_so in problems.items():
        if is_so:
            raise ConfigError(name, problem, f"leave {name} or that setting out")


def _values(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config that were given."""
    return {one.field: one.parse(given[one.name]) for one in settings_of(config) if one.name in given}
