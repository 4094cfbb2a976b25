"""Kernels as Triton's compiler takes them, and the names under which its cache has them, which must not depend on the
process or on the order of launches. Imports no torch."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ratoon.layers.triton.compiler_process import Request
from ratoon.layers.triton.internals import IS_KNOWN, GPUTarget, JITCallable


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def launcher_digest(module: str, name: str, signature: Mapping[str, Any], constants: Mapping[Any, Any]) -> str | None:
    """The digest of the C function that launches a kernel, the same for all kernels of these arguments. None: it
    depends on how the kernel was compiled."""
    if any(str(kind).startswith("tensordesc") for kind in signature.values()):
        return None
    return digest_of(f"launcher of {module} {name} {signature} {sorted(constants)}")


def settle_key(function: Any) -> None:
    """Have Triton hash a kernel's source, after that of each function it calls.

    Triton takes the globals that a function uses into the hash of its callers only if that one was hashed before, by an
    earlier kernel. The same kernel would have another name in another process, and be compiled again.
    """
    if IS_KNOWN and isinstance(function, JITCallable) and function.hash is None:
        for called in all_functions(function):
            called.cache_key  # noqa: B018 (made on access)


def all_functions(function: JITCallable) -> list[JITCallable]:
    """The function and those that it calls, each after those that it calls itself."""
    found: dict[int, JITCallable] = {}
    seen: set[int] = set()

    def visit(function: JITCallable) -> None:
        if id(function) not in seen:
            seen.add(id(function))
            for called in _functions_used(function):
                visit(called)
            found[id(function)] = function

    visit(function)
    return list(found.values())


def _functions_used(function: JITCallable) -> Iterator[JITCallable]:
    code, scope = function.fn.__code__, function.get_capture_scope()
    for name in (*code.co_names, *code.co_freevars):
        value = scope.get(name)
        if isinstance(value, JITCallable):
            yield value
        elif getattr(value, "__triton_aggregate__", False):
            yield from (attr for attr in value.hash_attrs if isinstance(attr, JITCallable))


def request_of_compilation(key: str, compile_fn: Callable[[], Any], is_urgent: bool) -> Request:
    """`compile_fn`: Triton's function, which compiles a kernel for the types and constants of a launch."""
    given = inspect.getclosurevars(compile_fn).nonlocals
    return request_of(key, given["src"], given["target"], given["options"], is_urgent)


def request_of(key: str, source: Any, target: GPUTarget, options: Any, is_urgent: bool) -> Request:
    function = source.fn.fn
    return Request(
        digest_of(key), function.__module__, function.__qualname__, target.arch,
        source.signature, source.constants, source.attrs, options.__dict__, is_urgent,
    )  # fmt: skip


def digests_of(request: Request) -> list[str]:
    """What is told when it is compiled: of the kernel, and of its launcher where that is compiled by itself."""
    launcher = launcher_digest(request.module, request.name, request.signature, request.constants)
    return [request.digest] if launcher is None else [request.digest, launcher]


class AbsentDevice:
    """What Triton asks of a driver before it compiles, for a GPU that this process does not use."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
