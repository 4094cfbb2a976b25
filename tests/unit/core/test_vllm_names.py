"""vLLM's names of settings: what means the same is taken, what would mean something else is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ratoon.core.errors import ConfigError
from ratoon.core.settings import engine_config


def test_settings_that_have_another_name_here() -> None:
    config = engine_config(
        "m", kv_cache_memory_bytes="1GiB", num_gpu_blocks_override=7, swap_space=0.5, scheduling_policy="priority",
        gpu_memory_utilization=0.9, dtype="half",
    )  # fmt: skip
    assert (config.cache.memory_bytes, config.cache.num_blocks, config.cache.swap_bytes) == (2**30, 7, 2**29)
    assert (config.scheduler.policy.value, config.dtype) == ("priority", "float16")
    assert config.cache.gpu_memory_utilization == 0.9


def test_eager_mode_is_the_opposite_of_graphs() -> None:
    assert engine_config("m").cuda_graphs and engine_config("m", enforce_eager=False).cuda_graphs
    assert not engine_config("m", enforce_eager=True).cuda_graphs


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("float", "float32"), (torch.bfloat16, "bfloat16"), ("torch.float16", "float16"), ("auto", "auto")],
)
def test_dtypes_as_vllm_writes_them(dtype: Any, name: str) -> None:
    assert engine_config("m", dtype=dtype).dtype == name


def test_what_changes_no_answer_changes_nothing() -> None:
    assert engine_config(
        "m", tensor_parallel_size=1, pipeline_parallel_size=1, trust_remote_code=False,
        revision=None, tokenizer="m", tokenizer_mode="auto", quantization=None,
        cpu_offload_gb=0, kv_cache_dtype="auto", max_seq_len_to_capture=8192, enable_lora=False, swap_space=0,
        served_model_name="x",
    ) == engine_config("m")  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size: 0 is out of range"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size: True"),
        ({"pipeline_parallel_size": 1.5}, "pipeline_parallel_size: 1.5 is out of range"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype: 'fp8_e5m2'"),
        ({"tokenizer": "other"}, "tokenizer: is another than the model's"),
        ({"revision": "v2"}, "revision: 'v2'"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb: 4"),
        ({"max_lora_rank": 512}, "max_lora_rank: 512 is out of range; 1 to 256"),
        ({"max_loras": 0}, "max_loras: 0 is out of range"),
        ({"enforce_eager": "yes"}, "enforce_eager: 'yes' is out of range"),
        ({"enforce_eager": True, "cuda_graphs": True}, "enforce_eager: and cuda_graphs are the same setting"),
        ({"swap_space": -1}, "swap_space: -1 is out of range"),
        ({"swap_space": 1, "swap_memory": "1GiB"}, "swap_space: and swap_memory are the same setting"),
        ({"kv_transfer_config": {"kv_connector": "a", "kv_role": "kv_producer"}}, "'kv_producer' is not supported"),
        ({"kv_transfer_config": {"kv_rank": 1}}, r"kv_transfer_config.kv_rank: is not supported; one of kv_role"),
        ({"kv_transfer_config": "{"}, "kv_transfer_config: '{' is no JSON"),
        (
            {"kv_transfer_config": {"kv_connector": "a"}, "kv_connector": "b"},
            "kv_transfer_config: and kv_connector are the same setting",
        ),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization: 1.5 is out of range"),
        ({"gpu_memory_utilization": 0.5, "kv_memory_fraction": 0.5}, "contradict each other"),
        ({"scheduling_policy": "random"}, "policy: 'random' is unknown"),
    ],
)
def test_values_that_would_mean_something_else_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        engine_config("m", **settings)
    assert words in str(refused.value)


def test_the_connector_of_a_transfer_config_is_chosen() -> None:
    text = '{"kv_connector": "files", "kv_role": "kv_both", "kv_connector_extra_config": {"folder": "/x"}}'
    config = engine_config("m", kv_transfer_config=text, swap_space=1)
    assert (config.cache.kv_connector, config.cache.kv_connector_options) == ("files", {"folder": "/x"})
