"""Triton's interpreter with a newer numpy: kernels run on CPU tensors where there is no GPU (TRITON_INTERPRET, set in
tests/conftest.py). And in less than half its time, most of which goes into the objects around each small operation."""

import builtins
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from triton import knobs

# Where there is a GPU, kernels run on it, and take no tensors of the CPU.
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="needs Triton's interpreter")


@cache
def repair_interpreter() -> None:
    """Bounds of loops are arrays of one element there, which numpy no longer takes for integers. Checks for overflow,
    which double the time, are left out."""
    if not knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch = interpreter._patch_lang_tensor

    def patch_more(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_more
    _patch_the_language_once_a_launch(interpreter)
    _look_up_types(interpreter)
    _share_shapes()


def _patch_the_language_once_a_launch(interpreter: Any) -> None:
    """The interpreter replaces the functions of triton.language in every call of one kernel by another, and looks for
    them anew each time. They stay replaced until the launch ends: once is enough."""
    tl = interpreter.tl
    names: dict[Any, list[str]] = {}  # of a module or class: what is replaced in it
    active: Any = None

    class Scope(interpreter._LangPatchScope):
        def __init__(self) -> None:
            super().__init__()
            self.languages: set[Any] = set()

        def restore(self) -> None:
            nonlocal active
            active = None
            super().restore()

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name, value in inspect.getmembers(package) if tl.core.is_builtin(value)]
        for name in names[package]:
            if tl.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    @cache
    def languages_of(fn: Callable[..., Any]) -> frozenset[Any]:
        found = frozenset(value for value in fn.__globals__.values() if value is tl or value is tl.core)
        assert found, "triton.language must be visible from within jit'd function"
        return found

    def patch_lang(fn: Callable[..., Any]) -> Any:
        nonlocal active
        if active is None:
            active = Scope()
            patch_builtin(tl.core.tensor_descriptor_base, interpreter.interpreter_builder, active)
        for language in languages_of(fn) - active.languages:
            patch_builtin(language, interpreter.interpreter_builder, active)
            patch_builtin(language.tensor, interpreter.interpreter_builder, active)
            if language is tl:
                patch_builtin(tl.math, interpreter.interpreter_builder, active)
            interpreter._patch_lang_tensor(language.tensor, active)
            interpreter._patch_lang_core(language, active)
            active.languages.add(language)
        return active

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang


def _look_up_types(interpreter: Any) -> None:
    """The interpreter writes down the table of all types whenever it looks for the type of an array."""
    tl, find, known = interpreter.tl, interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar if isinstance(dtype, tl.block_type) else dtype
        name = "a pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
        if name not in known:
            known[name] = find(scalar)
        return known[name]

    interpreter._get_np_dtype = get_np_dtype


def _share_shapes() -> None:
    """Every value of a kernel describes its shape by objects of its own. Values of one shape share them, and names of
    types are written when they are asked for."""
    from triton.language import core

    @cache
    def of_integers(shape: builtins.tuple[int, ...]) -> tuple[Any, int]:
        """The shape as a type has it, and the number of elements."""
        return core.tuple(list(shape)), core.validate_block_shape(shape)

    @cache
    def of_constants(shape: builtins.tuple[int, ...]) -> tuple[Any, Any]:
        """The shape as a value has it, and the number of elements."""
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        sizes = builtins.tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.shape, self.numel = of_integers(sizes)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = builtins.tuple(type.shape.values) if type.is_block() else ()
        self.shape, self.numel = of_constants(sizes)

    def make_tuple(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def find_in_tuple(self: Any, name: str) -> Any:
        if name == "type":
            self.type = core._type_for_tuple_values(self.values)
            return self.type
        if name == "values":  # of a tuple that is not made yet
            raise AttributeError(name)
        return self.values[self.type.fields.index(name)]

    core.tuple.__init__, core.tuple.__getattr__ = make_tuple, find_in_tuple
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.block_type.__init__, core.tensor.__init__ = make_type, make_tensor
