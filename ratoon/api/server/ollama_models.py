"""What Ollama's lists say of a model: from its files, which are read once, and from its engine if it is loaded."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from ratoon.api.answer_parts.parser import choose_answer_format
from ratoon.api.server.model_directory import ModelEntry
from ratoon.core.errors import ModelError
from ratoon.models.hub import cache_folder
from ratoon.models.installed import size_of_weights
from ratoon.models.source import ModelSource, resolve_model

FOREVER = datetime(9999, 1, 1, tzinfo=UTC)


@lru_cache(64)
def _read_source(model: str) -> ModelSource | None:
    """Reads a model's metadata. None: it is not on this machine, or can't be read."""
    try:
        if size_of_weights(model) or Path(model).expanduser().exists() or cache_folder(model).exists():
            return resolve_model(model)
    except ModelError:
        pass
    return None


def source_of(entry: ModelEntry) -> ModelSource | None:
    return _read_source(entry.model) if entry.source is None else entry.source


def list_files(entry: ModelEntry) -> dict[str, Any]:
    """Describes a model in the list of those that can be asked."""
    source = source_of(entry)
    size, modified = 0, datetime.fromtimestamp(entry.created, UTC)
    if source is not None:
        size = _size(source.path)
        modified = datetime.fromtimestamp(source.path.stat().st_mtime, UTC)
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": modified.isoformat(),
        "size": size,
        "digest": _digest(source, entry, size, modified),
        "details": _details(source, entry),
        "state": str(entry.state),
    }


def describe_loaded(entry: ModelEntry) -> dict[str, Any]:
    left = entry.seconds_left
    expires = FOREVER if left is None else datetime.now(UTC) + timedelta(seconds=left)
    return {
        **{name: value for name, value in list_files(entry).items() if name != "modified_at"},
        "size": entry.held,
        "size_vram": entry.held if entry.is_on_gpu else 0,
        "expires_at": expires.isoformat(),
        "context_length": entry.max_model_len,
    }


def describe_files(entry: ModelEntry) -> dict[str, Any]:
    source = source_of(entry)
    listed = list_files(entry)
    info: dict[str, Any] = {}
    capabilities = ["completion"]
    template, defaults = "", {}
    if source is not None:
        family, config = _family(source), source.config
        info = {
            "general.architecture": family,
            "general.basename": entry.name,
            f"{family}.context_length": entry.max_model_len or config.max_position,
            f"{family}.embedding_length": config.hidden_size,
            f"{family}.block_count": config.num_layers,
            f"{family}.vocab_size": config.vocab_size,
        }
        template, defaults = source.chat_template or "", source.generation_defaults
        capabilities = _capabilities(source)
    return {
        "modelfile": f"# Ratoon has no Modelfile. The model is {entry.model}",
        "parameters": "\n".join(f"{name} {value}" for name, value in sorted(defaults.items())),
        "template": template,
        "details": listed["details"],
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": listed["modified_at"],
    }


def _capabilities(source: ModelSource) -> list[str]:
    found = ["embedding"] if source.pooling is not None else ["completion"]
    template = source.chat_template
    if template is not None and "tools" in template:
        found.append("tools")
    if template is not None and choose_answer_format(template).reasoning is not None:
        found.append("thinking")
    if source.config.media is not None:
        found.append("vision")
    return found


def _family(source: ModelSource) -> str:
    return str(source.raw_config.get("model_type", source.config.architecture))


def _details(source: ModelSource | None, entry: ModelEntry) -> dict[str, Any]:
    family = "" if source is None else _family(source)
    return {
        "parent_model": "",
        "format": "" if source is None else source.format,
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _count(entry.num_weights),
        "quantization_level": entry.weight_format,
    }


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number) if number else ""


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def _digest(source: ModelSource | None, entry: ModelEntry, size: int, modified: datetime) -> str:
    """Names the version of the files by place, size and time: reading all of their bytes would take long."""
    place = entry.model if source is None else str(source.path)
    return hashlib.sha256(f"{place}\0{size}\0{modified.timestamp()}".encode()).hexdigest()
