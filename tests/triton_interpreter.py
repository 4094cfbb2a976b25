"""Triton's interpreter with a newer numpy: kernels run on CPU tensors where there is no GPU (TRITON_INTERPRET, set in
tests/conftest.py)."""

from dataclasses import replace
from typing import Any

import pytest
from triton import knobs

# Where there is a GPU, kernels run on it, and take no tensors of the CPU.
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="needs Triton's interpreter")


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
