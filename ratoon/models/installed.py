"""Which models are on this machine: embedded ones, the hub's cache, and folders that are named. Opens no weights."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratoon.core.errors import ConfigError, ModelError
from ratoon.models.damage import shorten
from ratoon.models.embedded import EMBEDDED_MODELS, find_embedded_model
from ratoon.models.hf_config import parse_hf_config, runs_in_library
from ratoon.models.hub import HUB_ID, cache_folder
from ratoon.models.source import what_would_be_right
from ratoon.models.tokenizer import read_json

FOLDERS_VARIABLE = "RATOON_MODELS"
MAX_SHOWN = 300  # characters of a name
MAX_DEPTH = 3  # of folders below one that is named
MAX_FOLDERS = 2000  # that are searched: a home directory has many


@dataclass(frozen=True, slots=True)
class InstalledModel:
    name: str  # the MODEL argument of commands
    kind: str  # embedded, hub, folder or gguf
    path: str
    size: int  # bytes on the disk
    architecture: str | None  # None: unknown without opening the file, or not supported
    note: str = ""  # why it can't be used, if so
    backend: str | None = None  # native or transformers; None: it can't be used


def installed_models(folders: Sequence[Path]) -> list[InstalledModel]:
    """All models found, by kind and name. Raises ConfigError for a missing folder."""
    return [*_embedded_models(), *_hub_models(), *_models_in([*folders, *_folders_of_environment()])]


def _folders_of_environment() -> list[Path]:
    return [Path(name) for name in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if name]


def _embedded_models() -> Iterator[InstalledModel]:
    for name in sorted(EMBEDDED_MODELS):
        try:
            path = find_embedded_model(name)
        except (ModelError, importlib.metadata.PackageNotFoundError) as error:
            expected = error.expected if isinstance(error, ModelError) else ""
            yield InstalledModel(name, "embedded", "", 0, None, f"not installed: {expected}")
            continue
        yield InstalledModel(name, "embedded", str(path), path.stat().st_size, None, backend="native")


def _hub_models() -> Iterator[InstalledModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = repo.refs.get("main") or max(repo.revisions, key=lambda revision: revision.last_modified)
        yield _describe(repo.repo_id, "hub", Path(newest.snapshot_path), repo.size_on_disk)


def _models_in(folders: Iterable[Path]) -> Iterator[InstalledModel]:
    seen: set[Path] = set()
    for folder in folders:
        if not folder.expanduser().is_dir():
            raise ConfigError("FOLDER", f"there is no folder {folder}", "one that exists")
        yield from _walk(folder.expanduser(), 0, seen)


def _walk(folder: Path, depth: int, seen: set[Path]) -> Iterator[InstalledModel]:
    """Models in a folder and below it, each once. Unreadable folders are skipped."""
    resolved = folder.resolve()
    if resolved in seen or len(seen) >= MAX_FOLDERS:
        return
    seen.add(resolved)
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    if (folder / "config.json").is_file() and any(entry.suffix == ".safetensors" for entry in entries):
        yield _describe(str(folder), "folder", folder, _size_of(entry for entry in entries if entry.is_file()))
        return
    for entry in entries:
        if entry.suffix == ".gguf" and entry.is_file():
            yield InstalledModel(str(entry), "gguf", str(entry), entry.stat().st_size, None, backend="native")
        elif entry.is_dir() and depth < MAX_DEPTH and not entry.name.startswith("."):
            yield from _walk(entry, depth + 1, seen)


def _describe(name: str, kind: str, folder: Path, size: int) -> InstalledModel:
    """Describes a model by its config. A model that can't be used is listed with a note."""
    architecture, note, backend = None, "", None
    try:
        raw = read_json(folder / "config.json")
        if not raw:
            note = "has no config.json"
        elif not any(folder.glob("*.safetensors")):
            note = "has no safetensors files"
        if raw and runs_in_library(raw):  # whether it does takes seconds to find out: `ratoon models --check`
            architecture, backend = raw["architectures"][0], "transformers"
        elif raw:
            architecture, backend = parse_hf_config(raw, name).architecture, "native"
    except ModelError as error:
        note = error.problem
    return InstalledModel(name, kind, str(folder), size, architecture, note, None if note else backend)


def _size_of(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def size_of_weights(model: str) -> int:
    """Returns the bytes of a model's weight files; 0: it is a hub id that is not in the cache. ModelError: there is no
    such model."""
    if model in EMBEDDED_MODELS:
        return find_embedded_model(model).stat().st_size
    path = Path(model).expanduser()
    if path.is_file():
        return path.stat().st_size
    if path.is_dir():
        return _size_of(path.glob("*.safetensors")) or _size_of(path.glob("*.gguf"))
    if HUB_ID.fullmatch(model) and not model.startswith("."):
        return _size_of((cache_folder(model) / "snapshots").glob("*/*.safetensors"))
    raise ModelError(shorten(model, MAX_SHOWN), "is no file, folder or known model", what_would_be_right())
