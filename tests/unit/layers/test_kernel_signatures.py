"""What relies on the headers of the CPU kernels: Python's signatures, and the programs that test kernels."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from ratoon.layers import native

ROOT = Path(__file__).parents[3]
HEADERS = [ROOT / "ratoon/layers/native" / name for name in ("kernels.h", "quantised.h")]
TYPES = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "void": None,
    "const char *": ctypes.c_char_p,
}
DECLARATION = re.compile(r"^(\w+ |const char \*|struct \w+ \*)(ratoon_\w+)\(([^)]*)\);", re.MULTILINE)


def type_of(parameter: str) -> object:
    return ctypes.c_void_p if "*" in parameter else TYPES[parameter.removeprefix("const ").split()[0]]


def declared() -> dict[str, tuple[object, list[object]]]:
    """Function → (type of the result, types of the parameters)."""
    functions = {}
    for header in HEADERS:
        for result, name, parameters in DECLARATION.findall(header.read_text()):
            types = [type_of(" ".join(parameter.split())) for parameter in parameters.split(",") if parameter != "void"]
            returned = ctypes.c_void_p if result.startswith("struct ") else TYPES.get(result, TYPES.get(result.strip()))
            functions[name] = (returned, types)
    return functions


OF_PROGRAMS = ("ratoon_run_program", "ratoon_time_program")  # which have a type of their own
CALLED = {name: types for name, types in native._SIGNATURES.items() if name not in OF_PROGRAMS}


@pytest.mark.parametrize("name", sorted(CALLED))
def test_python_calls_a_kernel_as_its_header_declares_it(name: str) -> None:
    assert CALLED[name] == declared()[name]


@pytest.mark.parametrize("name", sorted(declared()))
def test_every_kernel_is_in_the_programs_that_run_on_both_architectures(name: str) -> None:
    programs = "".join(path.read_text() for path in (ROOT / "tests/native").glob("*.c"))
    assert re.search(rf"\b{name}\(", programs), f"tests/native/*.c never call {name}"
