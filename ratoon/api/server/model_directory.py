"""What a server says of its models, whether it has one or several: in /v1/models, and in Ollama's lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request

from ratoon.api.server.context import ServerContext
from ratoon.api.server.model_slots import ModelMemory, ModelState
from ratoon.engine.input.default_params import SAMPLING_DEFAULTS

if TYPE_CHECKING:
    from ratoon.core.config import ModelConfig
    from ratoon.engine.async_llm import AsyncLLM
    from ratoon.models.source import ModelSource

OWNER = "ratoon"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    name: str
    names: tuple[str, ...]
    model: str  # where it is: a folder, a file, a hub id
    state: str  # a ModelState
    created: int
    memory: ModelMemory = field(default_factory=ModelMemory)
    held: int = 0  # bytes, now
    overrides: Mapping[str, Any] | None = None
    source: ModelSource | None = None  # None: its files have not been read
    max_model_len: int | None = None  # None: it is known when the model was loaded
    adapters: Mapping[str, str] = field(default_factory=dict)  # their paths
    seconds_left: float | None = None  # that it is kept after its last request; None: forever
    num_unfinished: int = 0
    error: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)  # the engine's description, if it is loaded
    sampling_defaults: Mapping[str, Any] | None = None  # of requests that leave a field out; None: not known yet

    @property
    def is_in_memory(self) -> bool:
        return self.state in (ModelState.LOADED, ModelState.ASLEEP)

    @property
    def is_on_gpu(self) -> bool:
        return str(self.figures.get("device", "")).startswith("cuda")

    @property
    def num_weights(self) -> int:
        return sum(one["num_weights"] for one in self.figures.get("weight_formats", ()))

    @property
    def weight_format(self) -> str:
        """The format of most weights; empty: it is not known."""
        formats = self.figures.get("weight_formats", ())
        return max(formats, key=lambda one: one["num_weights"])["format"] if formats else ""


class ModelDirectory(Protocol):
    def entries(self) -> list[ModelEntry]: ...

    def find_entry(self, name: str) -> ModelEntry:
        """ApiError: there is no such model."""
        ...


class OneModel:
    """The directory of a server with one model, which is always loaded."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def entries(self) -> list[ModelEntry]:
        return [self._entry()]

    def find_entry(self, name: str) -> ModelEntry:
        self._context.check_model(name)
        return self._entry()

    def entries_by_name(self) -> Iterator[tuple[str, ModelEntry]]:
        entry = self._entry()
        yield from ((name, entry) for name in entry.names)

    def _entry(self) -> ModelEntry:
        context = self._context
        llm = context.llm
        figures = llm.describe()
        memory = ModelMemory(figures.get("weight_bytes") or 0, figures.get("kv_bytes") or 0)
        is_asleep = any(engine.asleep for engine in llm.health().engines)
        return ModelEntry(
            name=context.served_names[0],
            names=context.model_names,
            model=llm.source.name,
            state=ModelState.ASLEEP if is_asleep else ModelState.LOADED,
            created=context.created,
            memory=memory,
            held=memory.weights if is_asleep else memory.total,
            source=llm.source,
            max_model_len=context.max_model_len,
            adapters={name: adapter.path for name, adapter in llm.list_adapters().items()},
            num_unfinished=context.num_unfinished,
            figures=figures,
            sampling_defaults=sampling_defaults(llm),
        )


def directory_of(request: Request) -> ModelDirectory:
    context = request.app.state.context
    return OneModel(context) if isinstance(context, ServerContext) else context


def describe_entry(entry: ModelEntry, name: str) -> dict[str, Any]:
    """Returns a model, or an adapter of it, as OpenAI's clients expect it."""
    adapter = entry.adapters.get(name)
    root = entry.model if entry.source is None else entry.source.name
    return {
        "id": name,
        "object": "model",
        "created": entry.created,
        "owned_by": OWNER,
        "root": root if adapter is None else adapter,
        "parent": None if adapter is None else entry.name,
        "max_model_len": entry.max_model_len,
        "input_modalities": None if entry.source is None else input_modalities(entry.source.config),
        "sampling_defaults": entry.sampling_defaults,
        "state": str(entry.state),
        "memory_bytes": entry.held,
        **({"error": entry.error} if entry.error else {}),
    }


def sampling_defaults(llm: AsyncLLM) -> dict[str, float | None]:
    """Returns the values of a request's fields that it leaves out: those of the model's files, or the usual ones."""
    params = llm.get_default_sampling_params()
    own = {name: getattr(params, name) for name in SAMPLING_DEFAULTS}
    return {**own, "max_tokens": llm.source.generation_defaults.get("max_new_tokens")}


def input_modalities(config: ModelConfig) -> list[str]:
    """Returns the kinds of input that a model reads: a speech model reads recordings alone."""
    if config.encoder is not None and config.encoder.num_mel_bins is not None:
        return ["audio"]
    if config.media is None:
        return ["text"]
    return ["text", "image", *(["video"] if config.media.video_token_id is not None else [])]
