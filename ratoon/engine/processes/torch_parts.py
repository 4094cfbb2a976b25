"""`import torch` without the parts that inference on a CPU never uses: tracing, export, decompositions, shape functions
in Python, quantisation modules. They are two fifths of its time, and are loaded if anything asks for them. It buys
0.7 s of 1.7 s of processor time at each start (torch 2.13, one Neoverse-N1 core).

While torch is imported, a finder puts an empty module in the place of each part. The first use of one loads all of them
in the order in which torch would have: they import each other in ways that allow only that order. A use is an attribute
of a part, an attribute that is missing in `torch`, an import of a further module of torch, or a call of a function that
torch took from a part. Then torch is as it always is. What can't be noticed: an operator on the meta device whose shape
function is in Python fails until one of these happens. A program that needs it imports torch before an engine starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

# Of torch, whether parts can be left for later depends on how its modules import each other. These were tried.
FIRST_VERSION, LAST_VERSION = (2, 11), (2, 13)

PARTS = frozenset(
    f"torch.{name}"
    for name in (
        "_higher_order_ops",
        "_meta_registrations",
        "_native",
        "ao",
        "compiler",
        "distributions",
        "export",
        "func",
        "masked",
        "nn.intrinsic",
        "nn.qat",
        "nn.quantizable",
        "nn.quantized",
        "quantization",
    )
)
# What `import torch` takes from parts, to offer it as its own
FUNCTIONS = {"torch._higher_order_ops": ("cond", "while_loop"), "torch.func": ("vmap",)}

# What is in torch's own library, and refuses to work before the parts are there
BOUND_TO_PARTS = ("Generator",)

LOADING = "torch._parts_for_later"  # a name of no module: importing it loads the parts


@contextmanager
def without_unused_parts(device: str) -> Iterator[None]:
    """Around the first import of torch. Without effect where it is imported already, is of an unknown version, or may
    run on a GPU, whose compiler uses the parts."""
    parts = _PostponedParts() if "torch" not in sys.modules and _can_postpone(device) else None
    if parts is None:
        yield
        return
    sys.meta_path.insert(0, parts)
    try:
        yield
    except BaseException:
        parts.stop()
        raise
    parts.watch_torch()


def _can_postpone(device: str) -> bool:
    spec = importlib.util.find_spec("torch")  # looks for the package without importing it
    if spec is None or spec.origin is None:
        return False
    folder = Path(spec.origin).parent
    if device != "cpu" and (folder / "lib" / "libtorch_cuda.so").exists():
        return False
    return FIRST_VERSION <= _version(folder) <= LAST_VERSION


def _version(folder: Path) -> tuple[int, ...]:
    """(2, 13), of the file that torch takes its version from; () if it is not there."""
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
        number = text.partition("__version__ = '")[2].partition("'")[0]
        return tuple(int(part) for part in number.split(".")[:2])
    except (OSError, ValueError):
        return ()


class _PostponedParts(MetaPathFinder):
    """The parts, and the finder that puts empty modules in their places and notices when one is needed."""

    def __init__(self) -> None:
        self.specs: dict[str, ModuleSpec] = {}  # the real ones, in the order of import
        self.functions: dict[tuple[str, str], Callable[..., Any]] = {}  # by module and name: what stands for them
        self.is_loading = False
        self._is_imported = False  # torch
        self._names_of_torch: dict[str, Any] = {}  # taken out of it until the parts are there

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Only asked for modules that are not loaded."""
        if not fullname.startswith("torch."):
            return None
        if fullname == LOADING:
            return ModuleSpec(fullname, _AllLoader(self))
        if fullname in PARTS and not (self._is_imported or self.is_loading):
            return self._postpone(fullname, path)
        package = sys.modules.get(fullname.rpartition(".")[0])
        if self._is_imported or isinstance(package, _EmptyModule):
            self.load_for(package)
        loaded = sys.modules.get(fullname)  # with the parts
        return None if loaded is None else ModuleSpec(fullname, _LoadedLoader(loaded))

    def _postpone(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        real = PathFinder.find_spec(name, path)
        if real is None or real.loader is None:
            return None
        self.specs[name] = real
        empty = ModuleSpec(name, _EmptyLoader(self), origin=real.origin)
        empty.submodule_search_locations = real.submodule_search_locations  # it says that this is a package
        return empty

    def function(self, module: str, name: str) -> Callable[..., Any] | None:
        """What stands for a function of a part, for torch to take while it is imported."""
        if self._is_imported or name not in FUNCTIONS.get(module, ()):
            return None

        def load_and_call(*arguments: Any, **options: Any) -> Any:
            self.load()
            return getattr(sys.modules[module], name)(*arguments, **options)

        return self.functions.setdefault((module, name), load_and_call)

    def watch_torch(self) -> None:
        """torch is imported: notice the uses that need no attribute of a part as well."""
        torch = sys.modules.get("torch")
        if torch is None or not self.specs:
            self.stop()
            return
        self._is_imported = True
        names = ("__getattr__", *BOUND_TO_PARTS)
        self._names_of_torch = {name: torch.__dict__.pop(name) for name in names if name in torch.__dict__}
        torch.__dict__["__getattr__"] = self._missing_in_torch

    def _missing_in_torch(self, name: str) -> Any:
        if is_asked_of_every_module(name):
            raise AttributeError(f"module 'torch' has no attribute {name!r}")
        self.load()
        return getattr(sys.modules["torch"], name)

    def load_for(self, module: ModuleType | None) -> None:
        """Loads what a use of this module needs: all parts; or this one alone, while torch is being imported or parts
        that use each other are being loaded."""
        if self._is_imported and not self.is_loading:
            self.load()
        elif isinstance(module, _EmptyModule):
            self.load_part(module)

    def load(self) -> None:
        """Load all parts. An import does it, which has what is needed for several threads."""
        importlib.import_module(LOADING)

    def load_all(self) -> None:
        self.is_loading = True
        torch = sys.modules["torch"]
        torch.__dict__.pop("__getattr__", None)
        torch.__dict__.update(self._names_of_torch)
        for name in list(self.specs):
            self.load_part(sys.modules[name])
        self.stop()
        for (module, name), function in self.functions.items():
            if torch.__dict__.get(name) is function:
                torch.__dict__[name] = getattr(sys.modules[module], name)

    def load_part(self, module: ModuleType) -> None:
        if not isinstance(module, _EmptyModule):
            return
        real = self.specs[module.__name__]
        assert real.loader is not None
        object.__setattr__(module, "__class__", ModuleType)
        module.__spec__, module.__loader__ = real, real.loader
        try:
            real.loader.exec_module(module)
        except BaseException:
            module.__class__ = _EmptyModule  # the next use tries again
            raise

    def stop(self) -> None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]


def is_asked_of_every_module(name: str) -> bool:
    """Whether tools that go through sys.modules ask for this name: that is no use of a part."""
    return name.startswith("__") and name != "__all__"


class _EmptyModule(ModuleType):
    """Stands in the place of a part until something asks for one of its names."""

    def __getattr__(self, name: str) -> Any:
        parts: _PostponedParts = self.__dict__["_parts"]
        function = parts.function(self.__name__, name)
        if function is not None:
            return function
        if is_asked_of_every_module(name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        parts.load_for(self)
        return getattr(self, name)

    def __dir__(self) -> Iterable[str]:
        self.__dict__["_parts"].load_for(self)
        return dir(self)


class _EmptyLoader(Loader):
    def __init__(self, parts: _PostponedParts) -> None:
        self._parts = parts

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["_parts"] = self._parts
        module.__file__ = self._parts.specs[module.__name__].origin
        module.__class__ = _EmptyModule


class _AllLoader(Loader):
    def __init__(self, parts: _PostponedParts) -> None:
        self._parts = parts

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._parts.load_all()


class _LoadedLoader(Loader):
    """The loader of a module that was loaded while it was looked for. With a spec of its own it would be executed
    again."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__
        module.__spec__ = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


# ---- the largest library of torch, loaded by a thread while an engine of this process still starts ----
# Linking it takes a fifth of a second, in which Python can run: `import torch` then finds it there.


def start_loading_torch_library() -> threading.Thread | None:
    """Returns the thread; None where there is nothing to load ahead."""
    path = _library_path()
    if path is None or "torch" in sys.modules:
        return None
    # Not a daemon: a process must not end while a library initialises itself.
    thread = threading.Thread(target=_load, args=(path,), name="load torch's library")
    thread.start()
    return thread


def _library_path() -> Path | None:
    """None for a build with CUDA, whose libraries find each other in ways of their own."""
    spec = importlib.util.find_spec("torch")  # looks for the package without importing it
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    path = folder / f"libtorch_cpu{'.dylib' if platform.system() == 'Darwin' else '.so'}"
    return path if path.exists() and not (folder / "libtorch_cuda.so").exists() else None


def _load(path: Path) -> None:
    """Where it fails, `import torch` will say what is wrong."""
    # A function that is called by ctypes runs without the interpreter's lock; making a CDLL of the path would hold it.
    with contextlib.suppress(OSError, AttributeError, TypeError):  # a system without dlopen
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        dlopen(os.fsencode(path), os.RTLD_NOW)
