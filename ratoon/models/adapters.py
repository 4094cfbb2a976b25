"""Files of adapters (LoRA): PEFT folders (peft_adapter.py) and GGUF adapters (gguf_adapter.py) in one form.

Opening one reads headers alone and does not import torch: names, shapes and ranks are compared with those of the model
before a number is read. Which part of an adapter a rank takes, and where its numbers go, is not known here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ratoon.core.adapters import Adapter
from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError
from ratoon.models.damage import reading
from ratoon.models.gguf_adapter import GGUFAdapter
from ratoon.models.peft_adapter import CONFIG_FILE, PEFTAdapter, find_weights

if TYPE_CHECKING:
    import torch

    from ratoon.models.adapter_parts import LowRankPart

Shapes = Mapping[str, tuple[int, ...]]  # of a model's tensors, by their names
EXPECTED = f"a folder with {CONFIG_FILE} and adapter_model.safetensors, or a .gguf file of an adapter"
HEADS = ("lm_head", "proj_out", "embed_out")
BELOW_MODULES = "language_model."
TABLES = (
    "embed_tokens",
    "wte",
    "shared",
    "word_embeddings",
    "embed_in",
)  # of vocabularies, by the last part of their names
OTHER_TABLES = ("wpe", "embed_positions", "position_embeddings", "token_type_embeddings", "relative_attention_bias")
# Modules of models that read images, which adapters have no parts for
MEDIA_MODULES = frozenset({"visual", "vision_tower", "vision_model", "multi_modal_projector", "connector"})
CHUNK_BYTES = 1 << 20
SETTLED_NS = 2 * 10**9  # behind its last change a file is taken for one whose next change has another time
MAX_DIGESTS = 4096
FileState = tuple[int, int, int, int, int]  # device, inode, size, times of the last change of contents and of anything
_digests: dict[tuple[FileState, ...], str] = {}  # of files in these states


class AdapterFile(Protocol):
    """An adapter whose headers were read."""

    name: str  # for messages: the file or folder
    parts: dict[str, LowRankPart]  # by the layer that each is added to, under the file's name of it
    saved: dict[str, tuple[int, ...]]  # layers that the adapter has weights of its own for, and their shapes

    def read(self, layer: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the matrices a [rank, in] and b [out, rank] of a part, in the floats of the file."""
        ...

    def read_saved(self, layer: str) -> torch.Tensor:
        """Returns the weight that replaces the layer's own."""
        ...


@dataclass(frozen=True, slots=True)
class FittedAdapter:
    """An adapter whose parts have been found among the layers of a model."""

    file: AdapterFile
    layers: Mapping[str, str]  # names of the model's layers to those of the file: of parts and of saved weights alike

    @property
    def rank(self) -> int:
        """The highest rank of its parts."""
        return max((part.rank for part in self.file.parts.values()), default=1)


def open_adapter(path: str | Path, config: ModelConfig | None = None) -> AdapterFile:
    """Reads the headers of an adapter. `config`: of its model, which the numbers of some GGUF adapters are read by.
    Raises ModelError for files that are damaged, or ask for something that is not supported."""
    path = Path(path).expanduser()
    with reading(str(path), EXPECTED):
        if path.is_dir():
            return PEFTAdapter(path)
        if path.suffix == ".gguf":
            return GGUFAdapter(path, config)
        if path.suffix in (".safetensors", ".json"):
            raise ModelError(str(path), "is one file of an adapter", f"the folder: {path.parent}")
        problem = f"is no adapter ({path.suffix or 'no suffix'})" if path.exists() else "is not there"
        raise ModelError(str(path), problem, EXPECTED)


def inspect(path: str | Path, shapes: Shapes, max_rank: int | None = None) -> Adapter:
    """Compares an adapter's files with a model before anything is loaded. `shapes`: of the model's tensors, by the
    names of its files (`ModelSource.tensors.shapes()`). Raises ModelError if it does not fit. Does not import torch."""
    fitted = fit(open_adapter(path), shapes)
    if max_rank is not None and fitted.rank > max_rank:
        raise ModelError(fitted.file.name, f"has the rank {fitted.rank}", f"at most {max_rank} (max_lora_rank)")
    return Adapter(digest_of(path), str(Path(path).expanduser().resolve()), fitted.rank)


def digest_of(path: str | Path) -> str:
    """Returns a digest of what the files of an adapter hold, 32 hexadecimal digits: not of their names and places. It
    is kept in this process until the files change: an adapter that is switched in again is not hashed again."""
    path = Path(path).expanduser()
    with reading(str(path), EXPECTED):
        files = [path / CONFIG_FILE, find_weights(path)] if path.is_dir() else [path]
        state = tuple(_state_of(file) for file in files)
        known = _digests.get(state)
        if known is not None:
            return known
        digest = _hash(files)
        newest = max(time_of_change for *_, time_of_change in state)
        # One that was written a moment ago may be written again without a new time
        if time.time_ns() - newest > SETTLED_NS and state == tuple(_state_of(file) for file in files):
            if len(_digests) >= MAX_DIGESTS:
                _digests.clear()
            _digests[state] = digest
        return digest


def _state_of(file: Path) -> FileState:
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _hash(files: Sequence[Path]) -> str:
    digest = blake2b(digest_size=16)
    for file in files:
        digest.update(file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb", buffering=0) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


# ---- the layers of a model ----


def fit(file: AdapterFile, shapes: Shapes) -> FittedAdapter:
    """Finds the layers of a model that an adapter's parts are of. Raises ModelError for one that the model has not, or
    of another shape."""
    layers = _linear_layers(shapes)
    tables = _tables(shapes)
    found: dict[str, str] = {}
    for name, part in file.parts.items():
        own = _find(name, layers) or _find(name, tables)
        if own is None:
            problem = f"has matrices for {name!r}, which the model has not"
            raise ModelError(file.name, problem, f"linear layers, such as {next(iter(layers), 'none')!r}")
        if not MEDIA_MODULES.isdisjoint(own.split(".")):
            problem = f"has matrices for {name!r}, a layer of the encoder of images"
            raise ModelError(file.name, problem, "an adapter of the layers that read text (target_modules of PEFT)")
        part.compare(file.name, name, layers[own] if own in layers else tables[own])
        found[own] = name
    for name, shape in file.saved.items():
        own = _find(name, {**tables, **{head: layers[head] for head in HEADS if head in layers}})
        if own is None:
            problem = f"has a weight of its own for {name!r} (modules_to_save)"
            raise ModelError(file.name, problem, "only for the token embeddings and the head")
        expected = tables.get(own) or layers[own]
        if shape != expected:
            problem = f"has {name!r} of shape {shape}, and the model of shape {expected}"
            raise ModelError(file.name, problem, "an adapter whose vocabulary was not resized")
        found[own] = name
    return FittedAdapter(file, found)


def _linear_layers(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Layers with a weight of two dimensions that is no table. A head without a weight has that of the table."""
    found: dict[str, tuple[int, ...]] = {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and name.split(".")[-2:][0] not in (*TABLES, *OTHER_TABLES)
    }
    table = next(iter(_tables(shapes).values()), None)
    if table is not None:
        for head in HEADS:
            found.setdefault(head, table)
    return found


def _tables(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.endswith(".weight") and name.split(".")[-2:][0] in TABLES
    }


def _find(name: str, layers: Mapping[str, object]) -> str | None:
    """Files of the same model have its layers below a prefix or not: `transformer.h.0` and `h.0`."""
    if name in layers:
        return name
    if BELOW_MODULES in name:  # modules of models that read images lie deeper than in their published files
        return _find(name.replace(BELOW_MODULES, "", 1), layers)
    ending = f".{name}"
    longer = [layer for layer in layers if layer.endswith(ending)]
    if len(longer) == 1:
        return longer[0]
    while "." in name:
        name = name.split(".", 1)[1]
        if name in layers:
            return name
    return None
