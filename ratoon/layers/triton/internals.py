"""The only file that reaches into Triton beyond its documented interface: how a compiled kernel is launched, how
kernels are named and kept, and what compiles them. Imports no torch, so that a process that only compiles needs none.

Tried with TESTED; pyproject.toml bounds Triton below the version after it. With any other version IS_KNOWN is False and
the plain way is taken everywhere: `kernel[grid](...)` launches, a kernel is compiled at its first launch, Triton's own
cache keeps it, and kernels in Gluon, which is experimental, are not used. Nothing but time is lost: with what is here
and compiles ahead, a cold start of Qwen3-0.6B on an H200 takes 5.2 s, and took 14.6 before (bench/gpu/NOTES.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import triton

TESTED = "3.6"  # the first two numbers of a version
_ARGUMENTS_FORMAT = "iiiKKppOOOOOO"  # of the launchers known here: what they take before the kernel's own arguments

IS_KNOWN = triton.__version__.split(".")[:2] == TESTED.split(".")
if IS_KNOWN or TYPE_CHECKING:
    from triton import AsyncCompileMode, knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.cache import FileCacheManager, get_cache_key, get_cache_manager, triton_key
    from triton.runtime.jit import JITCallable, JITFunction

    INTERPRETED = bool(knobs.runtime.interpret)  # kernels run in Python
    # Of Triton's profilers: lists, which they append to
    enter_hooks = getattr(knobs.runtime.launch_enter_hook, "calls", None)
    exit_hooks = getattr(knobs.runtime.launch_exit_hook, "calls", None)
else:
    INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    AsyncCompileMode = FileCacheManager = JITCallable = JITFunction = object
    GPUTarget = get_cache_manager = triton_key = enter_hooks = exit_hooks = None


class Prepared(NamedTuple):
    """A compiled kernel, ready for launches of one kind."""

    function: Callable[..., None]  # (x, y, z, stream, *before, *arguments)
    before: tuple[Any, ...]


def prepare(compiled: Any) -> Prepared | None:
    """Takes apart what Triton returned from a launch. None: its launcher is not one of those known here."""
    run: Any = getattr(compiled, "_run", None)
    if type(run).__name__ != "CudaLauncher" or run.global_scratch_size or run.profile_scratch_size:
        return None
    none = (None, None)  # scratch memory; metadata and hooks of the launch
    before = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, *none, compiled.packed_metadata, None)
    return Prepared(run.launch, (*before, *none))


def has_known_launchers() -> bool:
    """Whether compiled kernels of this Triton can be launched without it."""
    if not IS_KNOWN or INTERPRETED or None in (enter_hooks, exit_hooks):
        return False
    from triton.backends.nvidia import driver

    return getattr(driver, "_BASE_ARGS_FORMAT", None) == _ARGUMENTS_FORMAT


def make_launcher(source: Any, metadata: Any) -> None:
    """Has Triton compile the C function that launches a kernel, which it keeps in its cache too. The C compiler takes
    as long as Triton."""
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(source, metadata)


def use_cache_class(manager: type) -> None:
    """Sets the class of the cache on disk for all of this process, unless another one was set."""
    if IS_KNOWN and knobs.cache.manager_class is None:
        knobs.cache.manager_class = manager


@contextmanager
def runs_replaced(make_run: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While it is entered, launches of kernels call what `make_run` makes of Triton's own function."""
    run = JITFunction.run
    JITFunction.run = make_run(run)
    try:
        yield
    finally:
        JITFunction.run = run


def source_of_kernel(kernel: Any, signature: Any, constants: Any, attrs: Any) -> Any:
    """Returns a kernel as the compiler takes it."""
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    return kind(kernel, signature, constants, attrs)


def options_of(target: GPUTarget, given: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the compiler's backend and the options of a compilation as a launch would have them."""
    backend = make_backend(target)
    given = {**given, "debug": knobs.runtime.debug, "instrumentation_mode": knobs.compilation.instrumentation_mode}
    return backend, backend.parse_options(given)


def cache_key_of(source: Any, backend: Any, options: Any) -> str:
    """Returns the name under which Triton keeps a compiled kernel."""
    return str(get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars()))
