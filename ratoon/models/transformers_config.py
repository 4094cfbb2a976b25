"""The ModelConfig of a decoder that runs through the Transformers library: asked of the library, not of config.json.

Files leave out what is the library's default, and name the same field in many ways. So the library reads the config,
and its module, without weights, says what it computes (transformers_trace.py). That needs torch. In a process that has
not imported it, such as the HTTP server's, a child process is asked.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ratoon.core.config import ModelConfig, PositionKind, RopeScaling
from ratoon.core.errors import ModelError
from ratoon.models.config_fields import LARGEST, MOST_LAYERS, ConfigFields
from ratoon.models.damage import shorten, show

BACKENDS = ("auto", "native", "transformers")  # values of the setting model_backend
INSTALL = 'pip install "ratoon[transformers]"'
DECODERS = ("ForCausalLM", "LMHeadModel")  # endings of architectures that may be in the library
CHILD_SECONDS = 300.0
MAX_NAME = 200


def is_installed() -> bool:
    return importlib.util.find_spec("transformers") is not None


def may_run(architecture: object) -> bool:
    """Whether the library lists this architecture among its decoders. Its table is read as text: importing it would
    import torch."""
    if not isinstance(architecture, str) or not architecture.endswith(DECODERS) or len(architecture) > MAX_NAME:
        return False
    return architecture.isidentifier() and f'"{architecture}"' in _table_of_decoders()


@lru_cache(maxsize=1)
def _table_of_decoders() -> str:
    """The lines of the library's table of decoders; empty where it is not installed."""
    found = importlib.util.find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return ""
    path = Path(found.submodule_search_locations[0], "models", "auto", "modeling_auto").with_suffix(".py")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return ""
    return text.partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES =")[2].partition("\n)")[0]


def architecture_of(raw: Mapping[str, Any], source: str) -> str:
    """The architecture of a config.json that is to run through the library. ModelError: it has none that could."""
    names = raw.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    if not is_installed():
        raise ModelError(source, "the Transformers backend is not installed", INSTALL)
    if not may_run(name):
        problem = f"architecture {show(name)} is not one of the decoders of the Transformers library that is installed"
        raise ModelError(source, problem, "a …ForCausalLM that it lists, or a native family with model_backend native")
    return str(name)


def parse_library_config(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """The config of a model that runs through the library. ModelError: it is not there, or can't run this model."""
    architecture = architecture_of(raw, source)
    fields = ConfigFields(raw, source)
    facts = _describe(raw, architecture, source)
    library = json.dumps({name: value for name, value in raw.items() if name != "auto_map"}, sort_keys=True)
    facts["position_kind"] = PositionKind(facts["position_kind"])
    facts["rope_scaling"] = RopeScaling(**facts["rope_scaling"])
    windows = facts.pop("windows")
    first = next((window for window in windows if window is not None), None)
    sliding = tuple(window is not None for window in windows)
    return ModelConfig(
        architecture=architecture,
        **facts,
        sliding_window=first,
        sliding_layers=None if first is None or all(sliding) else sliding,
        checkpoint_dtype=fields.dtype(),
        eos_token_ids=fields.token_ids("eos_token_id"),
        library=library,
    )


def _describe(raw: Mapping[str, Any], architecture: str, source: str) -> dict[str, Any]:
    if "torch" in sys.modules:
        return describe(raw, architecture, source)
    return _ask_child(json.dumps({"raw": raw, "architecture": architecture, "source": source}), source)


def _ask_child(asked: str, source: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "ratoon.models.transformers_config"]
    try:
        ended = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        problem = f"the Transformers library did not read its config within {CHILD_SECONDS:g} seconds"
        raise ModelError(source, problem, "a machine with less to do, or another model") from error
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        problem = f"the Transformers library failed ({shorten(ended.stderr.strip()[-300:], 300)})"
        raise ModelError(source, problem, f"another version of it: {INSTALL}") from error
    if "facts" not in answer:
        raise ModelError(source, answer["problem"], answer["expected"])
    facts: dict[str, Any] = answer["facts"]
    return facts


def describe(raw: Mapping[str, Any], architecture: str, source: str) -> dict[str, Any]:
    """Fields of a ModelConfig, and `windows`, those of each layer, as plain data. Imports torch."""
    try:
        from ratoon.models.transformers_trace import trace_module
    except ImportError as error:
        raise ModelError(source, f"the Transformers library can't be imported ({error})", INSTALL) from error
    if isinstance(count := raw.get("num_hidden_layers"), int) and count > MOST_LAYERS:
        raise ConfigFields(raw, source).wrong("num_hidden_layers", f"is {count}", f"at most {MOST_LAYERS}")
    traced = trace_module(raw, architecture, source)
    config, first = traced.config, traced.attention[0]
    max_position = getattr(config, "max_position_embeddings", None)
    if not isinstance(max_position, int) or not 0 < max_position <= LARGEST:
        problem = f"config field max_position_embeddings is {show(max_position)}"
        raise ModelError(
            source, problem, 'expected a whole number above 0: hf_overrides={"max_position_embeddings": N}'
        )
    inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None)
    rope = getattr(config, "rope_parameters", None) or {}
    bos = getattr(config, "bos_token_id", None)
    return {
        "vocab_size": traced.embedding.num_embeddings,
        "hidden_size": traced.embedding.embedding_dim,
        "intermediate_size": inner if isinstance(inner, int) else 4 * traced.embedding.embedding_dim,
        "num_layers": len(traced.layers),
        "num_heads": first.num_heads,
        "num_kv_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "max_position": max_position,
        "position_kind": (PositionKind.ROTARY if rope else PositionKind.TABLE).value,
        "rope_scaling": _scaling_of(rope),
        "attention_scale": first.scale,
        "attention_soft_cap": first.soft_cap,
        "attention_sinks": first.sinks is not None,
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "bos_token_id": bos if isinstance(bos, int) else None,
        "windows": [one.window for one in traced.attention],
    }


def _scaling_of(rope: Mapping[str, Any]) -> dict[str, Any]:
    """How far the rotation reaches, which limits max_model_len; the rotation itself is the library's."""
    kind, factor = rope.get("rope_type", "default"), rope.get("factor")
    if kind == "default" or not isinstance(factor, (int, float)):
        return {}
    original = rope.get("original_max_position_embeddings")
    return {"kind": kind, "factor": float(factor), "original_max_position": original}


def _answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"facts": describe(asked["raw"], asked["architecture"], asked["source"])}
    except ModelError as error:
        return {"problem": error.problem, "expected": error.expected}


if __name__ == "__main__":
    print(json.dumps(_answer(json.load(sys.stdin))))
