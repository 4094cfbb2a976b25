"""The adapters (LoRA) that requests may name: a table of names in the front end.

A request takes its adapter to the engine with it, as a digest of the files and their place (core/adapters.py). Engines
therefore have no table of their own: one that was started again loads what the requests handed over to it need. A name
that is removed ends for new requests at once; those that run keep their adapter.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ratoon.core.adapters import Adapter, BaseModel
from ratoon.core.config import AdapterConfig
from ratoon.core.errors import ModelError, RequestError

MAX_NAME = 256  # characters
MAX_SHOWN_NAMES = 10  # in a message
FILES = ("adapter_config.json", "adapter_model.safetensors")  # of a folder, by which a change is noticed

Signature = tuple[tuple[int, int, int] | None, ...]


class AdapterRegistry:
    """`inspect` reads the headers of an adapter's files and compares them with the model: ModelError if it does not
    fit. It takes some milliseconds; what is known already takes none."""

    def __init__(self, config: AdapterConfig, inspect: Callable[[str], Adapter]) -> None:
        self._config = config
        self._inspect = inspect
        self._named: dict[str, Adapter] = {}
        # Adapters that requests named by their paths, the least recently used first, with a mark of the files' state
        self._by_path: OrderedDict[str, tuple[Signature, Adapter]] = OrderedDict()
        self._lock = threading.Lock()  # requests are checked in several threads

    # ---- names ----

    @property
    def named(self) -> Mapping[str, Adapter]:
        """The adapters by name. It is replaced, never changed."""
        return self._named

    def add(self, name: Any, path: Any, *, in_place: bool = True) -> Adapter:
        """Reads an adapter's headers and gives it a name. A name in use is given to the new one if `in_place`, or
        refused. RequestError: the name or the files are not right."""
        adapter = self.inspect(path)
        self.note(name, adapter, in_place=in_place)
        return adapter

    def inspect(self, path: Any) -> Adapter:
        self.verify_enabled()
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise RequestError("lora_path", f"{path!r} is not a path", "the folder of an adapter, or its .gguf file")
        try:
            return self._inspect(os.fspath(path))
        except ModelError as error:
            raise RequestError("lora_path", f"{error.subject} {error.problem}", error.expected) from None

    def note(self, name: Any, adapter: Adapter, *, in_place: bool = True) -> None:
        """Gives a name to an adapter that was inspected."""
        self.verify_enabled()
        verify_name(name)
        with self._lock:
            if name in self._named and not in_place:
                raise RequestError(
                    "lora_name",
                    f"{name!r} is the name of {self._named[name].path}",
                    "another name, or load_inplace to replace it",
                )
            most = self._config.max_adapters
            if name not in self._named and len(self._named) >= most:
                problem = f"{len(self._named)} adapters have names already"
                raise RequestError("lora_name", problem, f"at most {most} (max_adapters): unload one first")
            self._named = {**self._named, name: adapter}

    def remove(self, name: Any) -> Adapter:
        """RequestError: there is no such adapter."""
        with self._lock:
            left = dict(self._named)
            adapter = left.pop(name, None) if isinstance(name, str) else None
            if adapter is None:
                raise RequestError("lora_name", f"there is no adapter {name!r}", self._known_names())
            self._named = left
            return adapter

    def replace(self, named: Mapping[str, Adapter]) -> None:
        """All names at once, as another process has them."""
        self._named = dict(named)

    # ---- requests ----

    def find(self, adapter: Any, lora_request: Any = None) -> Adapter | BaseModel | None:
        """The adapter that a request names: by name or path, or as vLLM's LoRARequest. None: it names none."""
        field = "adapter"
        if lora_request is not None:
            if adapter is not None:
                raise RequestError("lora_request", "and adapter are the same option", "one of the two")
            field, adapter = "lora_request", _path_or_name(lora_request)
        if adapter is None or isinstance(adapter, BaseModel):
            return adapter
        self.verify_enabled(field)
        if isinstance(adapter, Adapter):
            return adapter
        if not isinstance(adapter, (str, os.PathLike)) or not os.fspath(adapter):
            raise RequestError(field, f"{adapter!r} is not an adapter", "a name, or a path to its files")
        found = self._named.get(os.fspath(adapter))
        return self._find_by_path(field, os.fspath(adapter)) if found is None else found

    def must_read(self, adapter: Any, lora_request: Any = None) -> bool:
        """Whether `find` reads files, which is better done in a thread."""
        if lora_request is not None:
            adapter = getattr(lora_request, "lora_path", None) or getattr(lora_request, "lora_name", None)
        return isinstance(adapter, (str, os.PathLike)) and os.fspath(adapter) not in self._named

    def _find_by_path(self, field: str, path: str) -> Adapter:
        folder = Path(path).expanduser()
        if len(path) > 4096 or "\0" in path or not folder.exists():
            shown = path if len(path) <= MAX_NAME else path[:MAX_NAME] + "…"
            raise RequestError(field, f"there is no adapter {shown!r}", self._known_names("or a path to its files"))
        key, state = str(folder.resolve()), _state_of(folder)
        with self._lock:
            known = self._by_path.get(key)
            if known is not None and known[0] == state:
                self._by_path.move_to_end(key)
                return known[1]
        try:
            adapter = self._inspect(path)
        except ModelError as error:
            raise RequestError(field, f"{error.subject} {error.problem}", error.expected) from None
        with self._lock:
            self._by_path[key] = state, adapter
            self._by_path.move_to_end(key)
            if len(self._by_path) > self._config.max_adapters:
                self._by_path.popitem(last=False)
        return adapter

    def inherit(self, parent: Adapter | None, named: Adapter | BaseModel | None) -> Adapter | None:
        """The adapter of a request that goes on from another one, or reads it: that of the other. RequestError: it
        names another one, or its parent's was unloaded."""
        if named is not None and _digest_of(named) != _digest_of(parent):
            problem = f"is {self.name_of(named)}, and the request that it goes on from has {self.name_of(parent)}"
            expected = "the same, or leave it out: what was computed with one is not valid for another"
            raise RequestError("adapter", problem, expected)
        if parent is None:
            return None
        found = self._find_digest(parent.digest)  # the same files may be in another place by now
        if found is None:
            problem = f"{self.name_of(parent)} of the request that it goes on from was unloaded"
            raise RequestError("adapter", problem, "load it again")
        return found

    def name_of(self, adapter: Adapter | BaseModel | None) -> str:
        """An adapter as messages name it."""
        if not isinstance(adapter, Adapter):
            return "none"
        name = next((name for name, one in self._named.items() if one.digest == adapter.digest), None)
        return repr(adapter.path if name is None else name)

    def verify_enabled(self, field: str = "adapter") -> None:
        if not self._config.enable_lora:
            expected = "start the engine with enable_lora=True (--enable-lora)"
            raise RequestError(field, "the engine has no memory for adapters", expected)

    def _find_digest(self, digest: str) -> Adapter | None:
        with self._lock:
            known = [*self._named.values(), *(adapter for _, adapter in reversed(self._by_path.values()))]
        return next((adapter for adapter in known if adapter.digest == digest), None)

    def _known_names(self, further: str = "") -> str:
        names = list(self._named)
        shown = ", ".join(map(repr, names[:MAX_SHOWN_NAMES])) + (", …" if len(names) > MAX_SHOWN_NAMES else "")
        known = f"one of {shown}" if names else "the name of one that was loaded"
        return f"{known}, {further}" if further else known


def _digest_of(adapter: Adapter | BaseModel | None) -> str | None:
    return adapter.digest if isinstance(adapter, Adapter) else None


def verify_name(name: Any) -> None:
    """RequestError for a name that requests could not use."""
    expected = f"1 to {MAX_NAME} printable characters, without spaces around them"
    if not isinstance(name, str):
        raise RequestError("lora_name", f"{name!r} is not a name", expected)
    if not name or len(name) > MAX_NAME or not name.isprintable() or name != name.strip():
        shown = name if len(name) <= MAX_NAME else name[:40] + "…"
        raise RequestError("lora_name", f"{shown!r} is not a name", expected)


def _path_or_name(request: Any) -> Any:
    """vLLM's LoRARequest, or any object with its attributes. Its path says what it is; one without is known by name."""
    found = getattr(request, "lora_path", None) or getattr(request, "lora_name", None)
    if found is None:
        problem = f"{type(request).__name__} has neither lora_path nor lora_name"
        raise RequestError("lora_request", problem, "LoRARequest(lora_name, lora_int_id, lora_path)")
    return found


def _state_of(path: Path) -> Signature:
    """Changes when the files do."""
    return tuple(_mark_of(path / name) for name in FILES) if path.is_dir() else (_mark_of(path),)


def _mark_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
