"""How kernels are launched.

`launch(kernel, grid, *args, **constants)` is `kernel[grid](*args, **constants)` in less time: what Triton finds out at
each launch (types, alignments, which compiled kernel fits) is kept after the first one.
Later launches of the same kind call the compiled kernel's launcher directly. Rules for a kernel and its callers:

- Arguments that are no constants (tl.constexpr) are given by position, Triton's options (num_warps, …) by keyword.
- Triton compiles an integer that is 1, or divisible by 16, in a special way. An integer that differs from step to step
  (numbers of tokens, requests, splits) therefore stands in the kernel's `do_not_specialize`: other integers are kept by
  value, and each new value costs one slow launch.
- `Launcher(kernel, **constants)` holds the constants; a caller that can keep one saves their lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from ratoon.layers.torch_internals import current_device, current_stream
from ratoon.layers.triton.internals import Prepared, enter_hooks, exit_hooks, has_known_launchers, prepare
from ratoon.layers.triton.kernel_cache import use_kernel_cache
from ratoon.layers.triton.kernel_requests import settle_key

use_kernel_cache()

recordings: list[Any] = []  # while there is one, all launches go through Triton (compilation.py)

MAX_KINDS = 4096  # of launches that a launcher keeps
_ALIGNMENT = 16  # bytes, of the pointers that Triton compiles for
_INT32_BITS = 31


# ---- launches ----


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    key = (kernel.fn, *constants, *constants.values())
    launcher = _launchers.get(key)
    if launcher is None:
        launcher = _launchers[key] = Launcher(kernel, **constants)
    launcher(grid, *args)


class Launcher:
    """A kernel with its constants; called with a grid and the other arguments."""

    __slots__ = ("_by_types", "_constants", "_kernel")

    def __init__(self, kernel: Any, **constants: Any) -> None:
        settle_key(kernel)
        self._kernel = kernel
        self._constants = constants
        self._by_types: dict[tuple[type, ...], Callable[..., Any]] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        if recordings:
            self._launch_by_triton(grid, *args)
            return
        types = tuple(map(type, args))
        launch_kind = self._by_types.get(types)
        if launch_kind is None:
            launch_kind = self._by_types[types] = self._launch_of(types)
        launch_kind(grid, *args)

    def _launch_of(self, types: tuple[type, ...]) -> Callable[..., Any]:
        layout = lay_out(types, self._kernel.params) if _can_prepare() else None
        if layout is None:
            return self._launch_by_triton
        kinds: dict[tuple[Any, ...], Prepared] = {}

        def launch_first(kind: tuple[Any, ...], grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
            prepared = prepare(self._launch_by_triton(grid, *args))
            if prepared is None:
                self._by_types[types] = self._launch_by_triton
            else:
                if len(kinds) >= MAX_KINDS:  # of an integer that should not be specialised on
                    kinds.clear()
                kinds[kind] = prepared

        return write_launch(layout)(kinds, launch_first)

    def _launch_by_triton(self, grid: tuple[int, ...], *args: Any) -> Any:
        return self._kernel[grid](*args, **self._constants)


_launchers: dict[tuple[Any, ...], Launcher] = {}


# ---- the kind of a launch ----


class ArgumentLayout(NamedTuple):
    """Which arguments of a kernel are tensors and which are numbers, by their places."""

    tensors: tuple[int, ...]
    descriptors: tuple[int, ...]  # of tensors that are copied in boxes
    fixed: tuple[int, ...]  # that a kind has by value
    varying: tuple[int, ...]  # integers that are not specialised on
    num_args: int
    num_constants: int  # behind the arguments


def lay_out(types: tuple[type, ...], params: Sequence[Any]) -> ArgumentLayout | None:
    """`params`: of the kernel, Triton's. None: such launches are left to Triton."""
    tensors, descriptors, fixed, varying = [], [], [], []
    for place, (kind, param) in enumerate(zip(types, params, strict=False)):
        if issubclass(kind, torch.Tensor):
            tensors.append(place)
        elif kind.__name__ == "TensorDescriptor":
            descriptors.append(place)
        elif kind is int and param.do_not_specialize:
            varying.append(place)
        elif kind in (int, bool, type(None)) or param.is_constexpr:
            fixed.append(place)
        elif kind is not float:
            return None
    behind = params[len(types) :]
    if not all(param.is_constexpr for param in behind):  # given by keyword
        return None
    places = (tuple(tensors), tuple(descriptors), tuple(fixed), tuple(varying))
    return ArgumentLayout(*places, len(types), len(behind))


@cache
def write_launch(layout: ArgumentLayout) -> Callable[..., Callable[..., Any]]:
    """A function that makes launches for arguments of this layout, from the kinds that are prepared and from a function
    for the first launch of a kind. It is written as code without loops: these would take most of the time.

    The kind holds all that Triton compiles a kernel for, and tells apart more than that: dtypes, alignment of pointers
    to 16 bytes, integers by value, and of those that are not specialised on whether they fit into 32 bits.
    """
    names = [f"a{place}" for place in range(layout.num_args)]
    pointers = [f"p{place}" for place in layout.tensors]
    varying = [names[place] for place in layout.varying]
    kind = ["device", *(f"a{place}.dtype" for place in layout.tensors), *(names[place] for place in layout.fixed)]
    for place in layout.descriptors:  # aligned, and expanded by the compiled kernel's launcher
        kind += [f"a{place}.base.dtype", f"*a{place}.block_shape"]
    lines = [f"p{place} = a{place}.data_ptr()" for place in layout.tensors]
    if pointers:
        lines.append(f"unaligned = ({' | '.join(pointers)}) % {_ALIGNMENT}")
        kind.append(f"unaligned and ({''.join(f'{pointer} % {_ALIGNMENT} == 0, ' for pointer in pointers)})")
    if varying:
        kind.append(f"({' | '.join(varying)}) >> {_INT32_BITS} and ({''.join(f'{name}, ' for name in varying)})")
    values = [f"p{place}" if place in layout.tensors else name for place, name in enumerate(names)]
    values += ["None"] * layout.num_constants  # in their places; launchers do not read them
    source = f"""
def make(kinds, launch_first):
    def launch({", ".join(["grid", *names])}):
        device = current_device()
        {"; ".join(lines) or "pass"}
        kind = ({"".join(f"{part}, " for part in kind)})
        prepared = kinds.get(kind)
        if prepared is None or enter_hooks or exit_hooks:
            return launch_first(kind, grid, ({"".join(f"{name}, " for name in names)}))
        function, before = prepared
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        function(x, y, z, current_stream(device), *before, {", ".join(values)})
    return launch
"""
    namespace: dict[str, Any] = {
        "current_device": current_device,
        "current_stream": current_stream,
        "enter_hooks": enter_hooks,
        "exit_hooks": exit_hooks,
    }
    exec(source, namespace)
    return namespace["make"]


@cache
def _can_prepare() -> bool:
    return torch.cuda.is_available() and torch.version.hip is None and has_known_launchers()
