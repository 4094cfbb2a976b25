"""Names under which Triton's cache has kernels. They must not depend on the process or on the order of launches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from triton.runtime.jit import JITCallable


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def launcher_digest(module: str, name: str, signature: Mapping[str, Any], constants: Mapping[Any, Any]) -> str | None:
    """Of the C function that launches a kernel, the same for all kernels of these arguments. None: it depends on how
    the kernel was compiled."""
    if any(str(kind).startswith("tensordesc") for kind in signature.values()):
        return None
    return digest_of(f"launcher of {module} {name} {signature} {sorted(constants)}")


def settle_key(function: Any) -> None:
    """Have Triton hash a kernel's source, after that of each function it calls.

    Triton takes the globals that a function uses into the hash of its callers only if that one was hashed before, by an
    earlier kernel. The same kernel would have another name in another process, and be compiled again.
    """
    if not isinstance(function, JITCallable) or function.hash is not None:
        return
    _settle(function, set())


def _settle(function: JITCallable, seen: set[int]) -> None:
    if id(function) in seen:
        return
    seen.add(id(function))
    for called in _functions_used(function):
        _settle(called, seen)
    function.cache_key  # noqa: B018 (made on access)


def _functions_used(function: JITCallable) -> Iterator[JITCallable]:
    code, scope = function.fn.__code__, function.get_capture_scope()
    for name in (*code.co_names, *code.co_freevars):
        value = scope.get(name)
        if isinstance(value, JITCallable):
            yield value
        elif getattr(value, "__triton_aggregate__", False):
            yield from (attr for attr in value.hash_attrs if isinstance(attr, JITCallable))
