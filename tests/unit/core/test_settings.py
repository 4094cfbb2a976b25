"""A setting is declared once, as a field of a config, and reaches Python and the command line from there."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import pytest

from ratoon.api.options import add_engine_options, add_setting_options, engine_settings, given_settings
from ratoon.core.config import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    FrontEndConfig,
    MediaSettings,
    SchedulerConfig,
    fit_to_device,
    verify_engine_config,
)
from ratoon.core.errors import ConfigError
from ratoon.core.setting import at_least, setting, settings_of, verify_settings
from ratoon.core.settings import ENGINE_SETTINGS, FRONT_END_SETTINGS, configure, engine_config
from ratoon.core.speculation import SpeculationConfig

NOT_SET_BY_PEOPLE = {
    "model", "cache", "scheduler", "speculation", "adapters", "media", "whole_images", "whole_prompts",
    "max_steps_of_branch", "num_rounds", "free_rows", "encodes_only", "encoder_folder", "encoder_folder_bytes",
    "encoder_listen", "rank_folder", "index_on_host", "num_on_host", "num_sharers", "tells_client",
}  # fmt: skip
SAMPLES: dict[type, str] = {int: "7", float: "0.25", dict: '{"a": 1}', str: "cpu"}
SPECIAL = {
    "state_interval": "32",
    "dtype": "float16",
    "load_format": "dummy",
    "model_backend": "transformers",
    "policy": "priority",
    "kv_cache_dtype": "fp8",
    "preemption_mode": "swap",
    "kv_files_io": "nixl",
    "expert_parallel_dispatch": "all_to_all",
    "quantization": "int8",
    "speculate": "ngram",
    "speculate_tokens": "9",
    "draft_acceptance": "rejection",
    "limit_mm_per_prompt": '{"image": 2}',
}
# Settings without which another is refused
NEEDED_WITH: dict[str, dict[str, Any]] = {
    "kv_events_replay": {"kv_events": "tcp://127.0.0.1:5557"},
    "kv_connector": {"swap_memory": "1GiB"},
    "nnodes": {"pipeline_parallel_size": 7},
    "node_rank": {"nnodes": 8, "pipeline_parallel_size": 8},
    "kv_connector_options": {"swap_memory": "1GiB", "kv_connector": "name"},
}


def test_every_field_of_the_configs_is_a_setting() -> None:
    parts = (CacheConfig, SchedulerConfig, SpeculationConfig, AdapterConfig, MediaSettings)
    for config in (EngineConfig, *parts, FrontEndConfig):
        declared = {one.field for one in settings_of(config)}
        assert set(config.__dataclass_fields__) - declared <= NOT_SET_BY_PEOPLE


def sample(one: Any) -> list[str]:
    if one.kind is bool:
        return [("--no-" if one.default else "--") + one.name.replace("_", "-")]
    return ["--" + one.name.replace("_", "-"), SPECIAL.get(one.name) or SAMPLES[one.kind]]


@pytest.mark.parametrize("one", ENGINE_SETTINGS, ids=lambda one: one.name)
def test_every_engine_setting_is_an_option_and_arrives_in_the_config(one: Any) -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    given = engine_settings(parser.parse_args(sample(one)))
    assert list(given) == [one.name]
    others = NEEDED_WITH.get(one.name, {})
    assert engine_config("m", **given, **others) != engine_config("m", **others)


def test_what_is_left_out_is_left_to_the_config() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    assert engine_settings(parser.parse_args([])) == {}


@dataclass(frozen=True)
class NewConfig:
    max_steps: int = setting(2, "steps that are under way at a time", at_least(1))
    pool: int | None = setting(None, "memory", name="pool_memory", size=True)


def test_a_new_setting_is_one_field(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="x")
    add_setting_options(parser.add_argument_group("new"), settings_of(NewConfig))
    args = parser.parse_args(["--max-steps", "3", "--pool-memory", "2KiB"])
    names = {one.name: one for one in settings_of(NewConfig)}
    given = given_settings(args, names)
    assert {names[name].field: names[name].parse(value) for name, value in given.items()} == {
        "max_steps": 3,
        "pool": 2048,
    }
    assert "steps that are under way at a time; default 2" in " ".join(parser.format_help().split())
    with pytest.raises(ConfigError, match="max_steps: 0 is out of range; a whole number of at least 1"):
        verify_settings(NewConfig(max_steps=0))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lease_fraction": "half"}, "lease_fraction: 'half' is out of range"),
        ({"lease_fraction": float("nan")}, "lease_fraction: nan is out of range"),
        ({"max_lease_seconds": 0}, "max_lease_seconds: 0 is out of range"),
        ({"max_num_seqs": True}, "max_num_seqs: True is out of range"),
        ({"kv_memory": "much"}, "kv_memory: 'much' is not a size"),
        ({"load_format": "pickle"}, "load_format: 'pickle' is unknown; auto or dummy"),
        ({"num_replicas": 0}, "num_replicas: 0 is out of range; a whole number of at least 1"),
    ],
)
def test_a_wrong_value_names_its_setting(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configure("m", settings)
    assert words in str(refused.value)


def test_a_config_that_python_built_is_checked_as_well() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        verify_engine_config(EngineConfig("m", cache=CacheConfig(block_size=0)))


def test_settings_of_the_front_end_and_of_the_engine_are_told_apart() -> None:
    front_end, engine = configure("m", {"seed": 3, "max_num_seqs": 4, "skip_tokenizer_init": True})
    assert (front_end.seed, front_end.skip_tokenizer, engine.scheduler.max_num_seqs) == (3, True, 4)
    assert not {one.name for one in FRONT_END_SETTINGS} & {one.name for one in ENGINE_SETTINGS}


@pytest.mark.parametrize(
    ("asked", "gpu_bytes", "budget"),
    [(None, 0, 2048), (None, 24 * 2**30, 2048), (None, 140 * 2**30, 8192), (512, 140 * 2**30, 512), (16384, 0, 16384)],
)
def test_the_token_budget_depends_on_the_gpu_unless_it_is_set(asked, gpu_bytes, budget):
    config = EngineConfig("model", scheduler=SchedulerConfig(max_num_batched_tokens=asked))
    assert fit_to_device(config, gpu_bytes).scheduler.token_budget == budget
