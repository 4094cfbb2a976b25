"""vLLM's names of engine settings, so that scripts for vLLM run with one changed import.

Three kinds: other names for existing settings, or for their opposites; settings of which only some values are supported
and the others are refused; and settings that do not affect answers and are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ratoon.core.errors import ConfigError
from ratoon.core.setting import json_object
from ratoon.core.speculation import from_vllm

GIB = 2**30
DTYPES = {"half": "float16", "float": "float32"}


class Rule(NamedTuple):
    accepts: Callable[[Any], bool]
    expected: str
    kind: type = str


def _nothing(value: Any) -> bool:
    return not value


HF_REVISION = Rule(_nothing, "leave it out: the newest one is used, or name the folder of another")
RENAMED = {
    "kv_cache_memory_bytes": "kv_memory",
    "num_gpu_blocks_override": "num_blocks",
    "scheduling_policy": "policy",
    "model_impl": "model_backend",
}
NEGATED = {"enforce_eager": "cuda_graphs"}  # switches that mean the opposite
RULES = {
    "tokenizer_mode": Rule(lambda value: value in (None, "auto", "hf", "fast"), "auto"),
    "tokenizer_revision": HF_REVISION,
    "revision": HF_REVISION,
    "cpu_offload_gb": Rule(_nothing, "0: the weights stay on one device", float),
    "lora_dtype": Rule(lambda value: value in (None, "auto"), "auto: the dtype of the model"),
}  # fmt: skip
# Settings that do not affect answers, and the type of their values.
NO_EFFECT: dict[str, type] = {
    "trust_remote_code": bool, "disable_custom_all_reduce": bool, "max_seq_len_to_capture": int,
    "compilation_config": str, "distributed_executor_backend": str, "worker_cls": str, "runner": str, "task": str,
    "download_dir": str, "served_model_name": str, "disable_async_output_proc": bool, "async_scheduling": bool,
    "headless": bool, "max_cpu_loras": int, "fully_sharded_loras": bool, "all2all_backend": str,
}  # fmt: skip
# Settings of one meaning each that no table covers
SPECIAL = {
    "swap_space": "`swap_memory`, in GiB",
    "tokenizer": "only the model's own is accepted",
    "kv_transfer_config": "`kv_connector` and `kv_connector_options`, as an object of vLLM's fields",
    "kv_events_config": "`kv_events`, `kv_events_replay` and `kv_events_topic`, as an object of vLLM's fields",
    "speculative_config": "`speculate` and `speculate_tokens`, as an object of vLLM's fields",
}
TRANSFER_FIELDS = {"kv_connector": "kv_connector", "kv_connector_extra_config": "kv_connector_options"}
EVENT_FIELDS = {"endpoint": "kv_events", "replay_endpoint": "kv_events_replay", "topic": "kv_events_topic"}
DEFAULT_EVENTS = "tcp://*:5557"
VLLM_NAMES = (*RENAMED, *NEGATED, *SPECIAL, *RULES, *NO_EFFECT)


def translate(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns these settings under Ratoon's names. Raises ConfigError for a value that is not supported."""
    given = dict(settings)
    for name in NO_EFFECT:
        given.pop(name, None)
    for name, rule in RULES.items():
        if name in given and not rule.accepts(value := given.pop(name)):
            raise ConfigError(name, f"{value!r} is not supported", rule.expected)
    if given.pop("tokenizer", None) not in (None, model):
        raise ConfigError("tokenizer", "is another than the model's", "leave it out, or put its files beside the model")
    if given.get("model_impl") == "vllm":  # its own code, as opposed to the library's
        given["model_impl"] = "native"
    for theirs, ours in RENAMED.items():
        _rename(given, theirs, ours, given.get(theirs))
    for theirs, ours in NEGATED.items():
        value = given.get(theirs)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(theirs, f"{value!r} is out of range", "True or False")
        _rename(given, theirs, ours, not value)
    swap = given.get("swap_space")
    if swap is not None and (isinstance(swap, bool) or not isinstance(swap, (int, float)) or not swap >= 0):
        raise ConfigError("swap_space", f"{swap!r} is out of range", "a number of GiB, 0 for none")
    _rename(given, "swap_space", "swap_memory", None if swap is None else int(swap * GIB))
    _rename_transfer(given)
    _rename_events(given)
    _rename_speculation(given)
    if given.get("quantization") is None:
        given.pop("quantization", None)
    if "dtype" in given:
        given["dtype"] = _dtype_name(given["dtype"])
    return given


def _rename(given: dict[str, Any], theirs: str, ours: str, value: Any) -> None:
    if given.pop(theirs, None) is None:
        return
    if given.get(ours) is not None:
        raise ConfigError(theirs, f"and {ours} are the same setting", "one of the two")
    given[ours] = value


def _rename_transfer(given: dict[str, Any]) -> None:
    """vLLM's object that names a connector. A connector takes and gives blocks here: other roles are refused."""
    transfer = json_object("kv_transfer_config", given.pop("kv_transfer_config", None))
    for name, value in transfer.items():
        if name == "kv_role":
            if value != "kv_both":
                raise ConfigError("kv_transfer_config.kv_role", f"{value!r} is not supported", "kv_both")
        elif name not in TRANSFER_FIELDS:
            expected = f"one of {', '.join(['kv_role', *TRANSFER_FIELDS])}"
            raise ConfigError(f"kv_transfer_config.{name}", "is not supported", expected)
        elif given.get(ours := TRANSFER_FIELDS[name]):
            raise ConfigError("kv_transfer_config", f"and {ours} are the same setting", "one of the two")
        else:
            given[ours] = value


def _rename_events(given: dict[str, Any]) -> None:
    """vLLM's object that says where events of the KV cache are published."""
    asked = json_object("kv_events_config", given.pop("kv_events_config", None))
    if not asked:
        return
    if asked.pop("publisher", "zmq") != "zmq":
        raise ConfigError("kv_events_config.publisher", "is not supported", "zmq")
    for name in ("buffer_steps", "hwm", "max_queue_size"):  # sizes of buffers, which are fixed here
        asked.pop(name, None)
    is_on = asked.pop("enable_kv_cache_events", False)
    for name in asked:
        if name not in EVENT_FIELDS:
            expected = f"one of {', '.join(['enable_kv_cache_events', 'publisher', *EVENT_FIELDS])}"
            raise ConfigError(f"kv_events_config.{name}", "is not supported", expected)
    if not is_on:
        return
    for name, value in {"endpoint": DEFAULT_EVENTS, **asked}.items():
        if given.get(ours := EVENT_FIELDS[name]):
            raise ConfigError("kv_events_config", f"and {ours} are the same setting", "one of the two")
        given[ours] = value


def _rename_speculation(given: dict[str, Any]) -> None:
    """vLLM's object that says what drafts, and how much."""
    for ours, value in from_vllm(given.pop("speculative_config", None)).items():
        if given.get(ours) is not None:
            raise ConfigError("speculative_config", f"and {ours} are the same setting", "one of the two")
        given[ours] = value


def _dtype_name(dtype: Any) -> Any:
    """The dtype's name, given an alias such as "half" or a torch dtype."""
    name = str(dtype).removeprefix("torch.")
    return DTYPES.get(name, name)
