"""Who takes part in which comparison, and with which file: as data. Nothing here runs an engine."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from export_hf import CACHE_FOLDER, DEFAULT_FOLDER, export_model
from export_hf import MODEL as EMBEDDED
from harness import OURS
from peers.conversion import converted_model
from peers.protocol import MAX_MODEL_LEN
from random_models import make_random_model

if TYPE_CHECKING:
    from ratoon.models.source import ModelSource

QUANTISED, FLOAT32 = "quantised", "float32"
FORMATS = ("Q4_0", "Q4_1")
FOLDER, GGUF, CT2 = "folder", "gguf", "ctranslate2"  # forms of a model
MANY = ("many-8", "many-32")
MOST_REQUESTS = 32
SHORTEST_CONTEXT = 16  # tokens: with less of them, no workload is left that says something


@dataclass(frozen=True)
class Engine:
    worker: str  # the module in peers/
    form: str
    package: str = ""  # that has to be there; none: it always is
    settings: dict[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()  # workloads, if it is there for some alone
    lacks: tuple[str, ...] = ()

    def takes(self, workload: str) -> bool:
        return workload in self.only if self.only else workload not in self.lacks


PARTS: dict[str, dict[str, Engine]] = {
    QUANTISED: {
        OURS: Engine("ratoon_worker", GGUF),
        "llama.cpp": Engine("llama_cpp_worker", GGUF, "llama_cpp", lacks=("beam",)),
        "llama-server": Engine("llama_server_worker", GGUF, "llama_cpp", only=MANY),
        "ctranslate2": Engine("ctranslate2_worker", CT2, "ctranslate2", {"compute_type": "int8"}),
    },
    FLOAT32: {
        OURS: Engine("ratoon_worker", FOLDER),
        # A search of 32 beams computes the prompt 32 times there: beams.py has it.
        "transformers": Engine("transformers_worker", FOLDER, lacks=("beam",)),
        "vllm": Engine("vllm_worker", FOLDER, "vllm", lacks=("beam",)),
    },
}


class Models:
    """One model in every form; each is made when it is first needed, and kept."""

    forms: tuple[str, ...] = (FOLDER, GGUF, CT2)
    max_model_len = MAX_MODEL_LEN
    settings: ClassVar[Mapping[str, dict[str, Any]]] = {}  # of engines, by name, in addition to those of a part

    def __init__(self, shape: str | None, ctranslate2_python: str | None) -> None:
        self._shape = shape  # of random weights; None: the embedded model
        self._ctranslate2_python = ctranslate2_python

    @property
    def name(self) -> str:
        return EMBEDDED if self._shape is None else f"{self._shape} with random weights"

    @cached_property
    def folder(self) -> Path:
        if self._shape is None:
            return export_model(EMBEDDED, DEFAULT_FOLDER)
        return make_random_model(self._shape, ()).folder

    @cached_property
    def config(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return facts

    @property
    def num_product_weights(self) -> int:
        """Of the linear layers, without the head: a token of a prompt is multiplied with each of them once."""
        config = self.config
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * head_dim * (heads + config["num_key_value_heads"])
        return int(config["num_hidden_layers"] * (attention + 3 * hidden * config["intermediate_size"]))

    def find(self, form: str, name: str) -> Path:
        """A form; of GGUF files the one in this format."""
        if form == FOLDER:
            return self.folder
        if form == CT2:
            return converted_model(self.folder, self._ctranslate2_python, "int8")
        if self._shape is not None:
            return make_random_model(self._shape, (name,)).files[name]
        from quality_parts.formats import make_file

        from ratoon.models.embedded import find_embedded_model

        source = find_embedded_model(EMBEDDED)
        return source if name == "Q4_1" else make_file(source, name, CACHE_FOLDER / "formats", table="Q8_0")


class FileModels(Models):
    """A GGUF file as it is: no other form is made of it."""

    forms = (GGUF,)

    def __init__(self, path: Path) -> None:
        """Raises ModelError if Ratoon can't run the file, or if its context is too short."""
        from ratoon.core.errors import ModelError
        from ratoon.models.source import resolve_model

        super().__init__(None, None)
        if path.suffix != ".gguf":
            raise ModelError(str(path), "is no GGUF file", "a .gguf file")
        self._source: ModelSource = resolve_model(str(path))
        self.path = path
        context = self._source.config.max_position
        if context < SHORTEST_CONTEXT:
            raise ModelError(str(path), f"has a context of {context} tokens", f"at least {SHORTEST_CONTEXT}")
        self.max_model_len = min(MAX_MODEL_LEN, context)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def config(self) -> dict[str, Any]:
        return self._source.raw_config

    @cached_property
    def num_product_weights(self) -> int:
        """The base class counts them by the config of a Llama; here the tensors tell."""
        experts = self._source.config.experts
        share = 1.0 if experts is None else experts.top_k / experts.num_experts
        matrices = {
            name: shape[0] * shape[1]
            for name, shape in self._source.tensors.shapes().items()
            if len(shape) == 2 and any(part.isdigit() for part in name.split("."))  # of a layer
        }
        return int(sum(size * (share if ".experts." in name else 1.0) for name, size in matrices.items()))

    def find(self, form: str, name: str) -> Path:
        return self.path


def has_embedded_model() -> bool:
    from ratoon.core.errors import ModelError
    from ratoon.models.embedded import find_embedded_model

    try:
        return find_embedded_model(EMBEDDED).exists()
    except ModelError:
        return False


def find_llama_server(given: str | None) -> str | None:
    """The one that is given, on the PATH, or beside llama-cpp-python's library."""
    found = given or shutil.which("llama-server")
    if found:
        return str(Path(found).resolve())
    spec = importlib.util.find_spec("llama_cpp")
    for place in spec.submodule_search_locations or () if spec else ():
        if (path := Path(place) / "lib" / "llama-server").exists():
            return str(path.resolve())
    return None


def missing_reason(engine: str, part: str, pythons: dict[str, str | None], llama_server: str | None) -> str | None:
    """Why an engine can't take part; None: it can."""
    package = PARTS[part][engine].package
    if engine == "llama-server" and llama_server is None:
        return "no program llama-server: name it with --llama-server"
    if package and not pythons.get(engine) and importlib.util.find_spec(package) is None:
        return f"no package {package} here"
    return None
