"""Finds a model by name and reads all metadata before its weights: `resolve_model`.

A name is a folder, a GGUF file, an embedded model or a hub id. The result has the same form for all of them. The model
is not built here, and torch is not imported until a tensor is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ratoon.core.config import ModelConfig, PositionKind
from ratoon.core.errors import ConfigError, ModelError
from ratoon.models.damage import reading, shorten, show
from ratoon.models.embedded import EMBEDDED_MODELS, find_embedded_model
from ratoon.models.expert_source import with_experts_apart
from ratoon.models.generation_config import generation_fields, read_generation_defaults
from ratoon.models.gguf_source import GGUFSource
from ratoon.models.gguf_tokenizer import chat_templates_from_gguf, load_tokenizer_from_gguf
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.hf_encoder_config import with_generation_config
from ratoon.models.hf_media_config import with_processor
from ratoon.models.hub import HUB_ID, download
from ratoon.models.safetensors_source import SafetensorsSource
from ratoon.models.sentence_files import known_additions, read_pooling, read_sentence_transformers, with_answer_ids
from ratoon.models.tokenizer import (
    DEFAULT_TEMPLATE,
    Tokenizer,
    load_tokenizer_from_folder,
    read_chat_templates,
    read_json,
)
from ratoon.models.weight_formats import read_weight_format

if TYPE_CHECKING:
    from ratoon.layers.weights import TensorSource

logger = logging.getLogger(__name__)

SPEECH_RATE = 16_000  # samples a second of what speech models read
Overrides: TypeAlias = Mapping[str, Any]  # fields that override those of a config.json
MAX_NAME = 4096  # characters: the longest path that Linux takes
MAX_SHOWN_NAME = 300


@dataclass
class ModelSource:
    """Where a model is and what it is. `tensors` opens the weight files, `load_tokenizer` reads the tokenizer."""

    name: str  # short: for messages, and the model id that a server lists
    path: Path
    format: str  # "safetensors" or "gguf"
    config: ModelConfig
    raw_config: dict[str, Any]  # in Hugging Face's terms, for all formats
    generation_defaults: dict[str, Any]  # defaults of its files for requests, and eos_token_ids
    chat_template: str | None
    pooling: str | None  # the pooling that the model was trained with, if a file says so
    open_tensors: Callable[[], TensorSource] = field(repr=False)
    open_tokenizer: Callable[[], Tokenizer] = field(repr=False)
    # Texts that stand before those that are embedded, by name, as sentence-transformers has them
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # the name of the one that stands there unless another is asked for

    @cached_property
    def tensors(self) -> TensorSource:
        with reading(str(self.path)):
            return self.open_tensors()

    def load_tokenizer(self) -> Tokenizer:
        with reading(str(self.path)):
            return self.open_tokenizer()


def resolve_model(name: str, overrides: Mapping[str, Any] | None = None, backend: str = "auto") -> ModelSource:
    """Find the model and read its config, with `overrides` applied. `backend` is the setting model_backend. Raises
    ModelError if the name or the model is invalid."""
    shown = shorten(name, MAX_SHOWN_NAME)
    if "\0" in name or not _is_text(name):
        raise ModelError(show(name), "has characters that no name has", what_would_be_right())
    if len(name) > MAX_NAME:
        raise ModelError(shown, f"is a name of {len(name):,} characters", what_would_be_right())
    with reading(shown, what_would_be_right()):
        source = _open_model(name, overrides or {}, backend)
        verify_overrides(source.config, overrides or {})
        return source


def _is_text(name: str) -> bool:
    """False for undecodable bytes, which Python represents as lone surrogates: no message could contain them."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _open_model(name: str, overrides: Overrides, backend: str) -> ModelSource:
    if name in EMBEDDED_MODELS:
        return replace(_open_gguf(find_embedded_model(name), overrides, backend), name=name)
    path = Path(name).expanduser()
    if path.is_file():
        return _open_file(path, overrides, backend)
    if name and path.is_dir():  # an empty path would be the current folder
        return _open_folder(path, overrides, backend)
    if HUB_ID.fullmatch(name) and not name.startswith("."):
        folder = download(name, what_would_be_right())
        return replace(_open_folder(folder, overrides, backend, name.rpartition("/")[2]), name=name)
    raise ModelError(shorten(name, MAX_SHOWN_NAME), "is no file, folder or known model", what_would_be_right())


def what_would_be_right() -> str:
    embedded = ", ".join(sorted(EMBEDDED_MODELS))
    return f"a Hugging Face folder, a .gguf file, a hub id (org/name), or an embedded model: {embedded}"


def _open_file(path: Path, overrides: Overrides, backend: str) -> ModelSource:
    if path.suffix == ".gguf":
        return _open_gguf(path, overrides, backend)
    if path.name == "config.json" or path.suffix == ".safetensors":
        raise ModelError(str(path), "is one file of a model", f"the folder: {path.parent}")
    raise ModelError(str(path), f"is no model file ({path.suffix or 'no suffix'})", what_would_be_right())


def _open_gguf(path: Path, overrides: Overrides, backend: str) -> ModelSource:
    source = GGUFSource(path)
    raw_config = with_overrides(source.raw_config, overrides)
    config = parse_hf_config(raw_config, str(path), backend)
    return ModelSource(
        name=path.stem,
        path=path,
        format="gguf",
        config=config,
        raw_config=raw_config,
        generation_defaults={"eos_token_ids": config.eos_token_ids} if config.eos_token_ids else {},
        chat_template=chat_templates_from_gguf(source.metadata, str(path)).get(DEFAULT_TEMPLATE),
        pooling=source.pooling,
        open_tensors=lambda: _as_built(source, config),
        open_tokenizer=lambda: load_tokenizer_from_gguf(source.metadata, str(path)),
    )


def _open_folder(folder: Path, overrides: Overrides, backend: str, name: str | None = None) -> ModelSource:
    """`name`: by which its family is known, if that is not the folder's."""
    if not (folder / "config.json").is_file():
        return _open_folder_without_config(folder, overrides, backend)
    raw_config = read_json(folder / "config.json")
    raw_config = with_overrides({**known_additions(raw_config, name or folder.resolve().name), **raw_config}, overrides)
    tensors: list[SafetensorsSource] = []  # opened at most once, and early only if the config has no dtype

    def open_files() -> SafetensorsSource:
        if not tensors:
            tensors.append(SafetensorsSource(folder))
        return tensors[0]

    wrap = read_weight_format(raw_config, str(folder))

    def open_tensors() -> TensorSource:
        return _as_built(open_files() if wrap is None else wrap(open_files()), config)

    if not (raw_config.get("dtype") or raw_config.get("torch_dtype")):
        raw_config["dtype"] = open_files().most_common_dtype()
    generation_path = folder / "generation_config.json"
    raw_generation = _with_changes(read_json(generation_path), overrides, folder)
    embedding = read_sentence_transformers(folder)
    config = _with_processor_of(folder, parse_hf_config(raw_config, str(folder), backend))
    if config.encoder is not None and config.encoder.reads_waveform:
        _verify_samples(folder)
    if embedding is not None:
        config = embedding.applied_to(config)
    if config.classifier is not None and config.classifier.tokens is not None:
        config = with_answer_ids(config, load_tokenizer_from_folder(folder), str(folder))
    generation = generation_fields(raw_generation, raw_config, config)
    generation_source = str(generation_path if raw_generation else folder / "config.json")
    config = with_generation_config(config, generation, generation_source, alone=bool(raw_generation))
    generation_defaults = read_generation_defaults(generation, config, generation_source)
    # A chat model's end-of-turn token is often in generation_config.json only.
    eos_token_ids = dict.fromkeys(config.eos_token_ids + generation_defaults.get("eos_token_ids", ()))
    return ModelSource(
        name=folder.resolve().name,
        path=folder,
        format="safetensors",
        config=replace(config, eos_token_ids=tuple(eos_token_ids)),
        raw_config=raw_config,
        generation_defaults=generation_defaults,
        chat_template=read_chat_templates(folder).get(DEFAULT_TEMPLATE),
        pooling=read_pooling(folder),
        open_tensors=open_tensors,
        open_tokenizer=lambda: load_tokenizer_from_folder(folder),
        prompts={} if embedding is None else embedding.prompts,
        default_prompt=None if embedding is None else embedding.default_prompt,
    )


def _as_built(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The tensors under the names, and in the pieces, by which the model takes them."""
    if config.library is None:
        return with_experts_apart(source, config)
    from ratoon.models.transformers_weights import with_module_names

    return with_module_names(source, config)


def _with_changes(raw_generation: dict[str, Any], overrides: Overrides, folder: Path) -> dict[str, Any]:
    """The keys of generation_config.json over which those of `hf_overrides` go; null leaves one out."""
    changes = (overrides or {}).get("generation_config")
    if changes is None:
        return raw_generation
    if not isinstance(changes, Mapping):
        raise ModelError(str(folder), f"hf_overrides has {changes!r} for generation_config", "an object of its keys")
    return {name: value for name, value in {**raw_generation, **changes}.items() if value is not None}


def _verify_samples(folder: Path) -> None:
    """ModelError: the model expects other samples than recordings have."""
    together = read_json(folder / "processor_config.json").get("feature_extractor")
    file = read_json(folder / "preprocessor_config.json") or (together if isinstance(together, Mapping) else {})
    if file.get("do_normalize") is True or file.get("sampling_rate", SPEECH_RATE) != SPEECH_RATE:
        problem = "asks for normalised samples (do_normalize), or for another rate than 16000 Hz (sampling_rate)"
        raise ModelError(str(folder / "preprocessor_config.json"), problem, "samples at 16000 Hz as they are")


def _with_processor_of(folder: Path, config: ModelConfig) -> ModelConfig:
    """The config with what the folder's files say about preprocessing of pictures. Newer ones have all kinds of
    preprocessing in one file."""
    if config.media is None:
        return config
    together = read_json(folder / "processor_config.json")
    image = read_json(folder / "preprocessor_config.json") or together.get("image_processor") or {}
    video = read_json(folder / "video_preprocessor_config.json") or together.get("video_processor")
    if not isinstance(image, Mapping):
        raise ModelError(str(folder / "processor_config.json"), "image_processor is no object", "fetch the file again")
    processor = {**image, "video_processor": video} if isinstance(video, Mapping) else image
    return replace(config, media=with_processor(config.media, processor, str(folder / "preprocessor_config.json")))


def _open_folder_without_config(folder: Path, overrides: Overrides, backend: str) -> ModelSource:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return _open_gguf(files[0], overrides, backend)
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelError(str(folder), f"holds {len(files)} GGUF files", f"name one of them: {names}")
    raise ModelError(str(folder), "has no config.json", "a Hugging Face folder: config.json and safetensors files")


ROPE_FIELDS = ("rope_parameters", "rope_scaling")  # the newer and the older name


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config with these fields replaced. An override of the rotary embedding replaces its scaling and keeps its
    base, under either name."""
    changed = {**raw, **overrides}
    for name in ROPE_FIELDS:
        rope = overrides.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise ConfigError(name, f"{rope!r} is not an object", '{"rope_type": "yarn", "factor": 4.0}, for example')
        theta = next((known["rope_theta"] for known in _rope_objects(raw) if "rope_theta" in known), None)
        kept = {} if theta is None else {"rope_theta": theta}
        for other in ROPE_FIELDS:
            changed.pop(other, None)
        changed["rope_parameters"] = {**kept, **rope}
    return changed


def verify_overrides(config: ModelConfig, overrides: Mapping[str, Any]) -> None:
    """ConfigError for a rope scaling of a model that has no rotary embedding."""
    given = next((name for name in ROPE_FIELDS if overrides.get(name) is not None), None)
    if given is not None and config.position_kind != PositionKind.ROTARY:
        raise ConfigError(given, f"the model's positions are {config.position_kind.value}, not rotary", "leave it out")


def _rope_objects(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [rope for name in ROPE_FIELDS[::-1] if isinstance(rope := raw.get(name), Mapping)]
