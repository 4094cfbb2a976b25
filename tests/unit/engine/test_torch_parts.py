"""Parts of torch that inference does not use are left out of its import, and are there for what asks for them.

The rules are tried on a small package of the same names, and once on torch itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Parts import each other in one order only: the second needs what the first has set.
FILES = {
    "__init__.py": """
loaded = []
from torch import ao as ao, export as export
from torch._higher_order_ops import cond as cond
def __getattr__(name):
    if name == "lazy":
        import torch.lazy
        return torch.lazy
    raise AttributeError(f"module 'torch' has no attribute {name!r}")
""",
    "version.py": "__all__ = []\n__version__ = '2.13.0+cpu'\n",
    "lazy.py": "",
    "further.py": "import torch; torch.loaded.append('further')",
    "ao/__init__.py": "import torch; torch.loaded.append('ao')\nimport torch._refs",
    "ao/nn.py": "import torch; torch.loaded.append('ao.nn')",
    "_refs.py": "",
    "export/__init__.py": """
import torch
torch.loaded.append('export')
import torch._refs
import torch.export.shapes
from torch._higher_order_ops import cond, helper
""",
    "export/shapes.py": "import torch; torch.loaded.append('export.shapes')",
    "_higher_order_ops/__init__.py": """
import torch
torch.loaded.append('_higher_order_ops')
def cond(value): return value + 1
def helper(): return 'helper'
""",
}
ALL_LOADED = ["ao", "export", "export.shapes", "_higher_order_ops"]
BEGIN = """
import sys
from ratoon.engine.processes.torch_parts import without_unused_parts
with without_unused_parts({device!r}):
    import torch
finders = [type(finder).__name__ for finder in sys.meta_path]
"""


@pytest.fixture(scope="module")
def small_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    write_package(folder, FILES)
    return folder


def write_package(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / "torch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def run(folder: Path, program: str, device: str = "auto") -> str:
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", BEGIN.format(device=device) + program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("torch.export.shapes", ALL_LOADED),
        ("torch._refs", ALL_LOADED),
        ("torch.ao.__all__ if hasattr(torch.ao, '__all__') else None", ALL_LOADED),
        ("dir(torch.ao)", ALL_LOADED),
        ("exec('import torch.further')", [*ALL_LOADED, "further"]),
        ("exec('import torch.ao.nn')", [*ALL_LOADED, "ao.nn"]),
        ("exec('import torch.export.shapes')", ALL_LOADED),
        ("exec('from torch._higher_order_ops import helper')", ALL_LOADED),
        ("torch.cond(1)", ALL_LOADED),
        ("hasattr(torch, 'lazy')", ALL_LOADED),
    ],
)
def test_any_use_loads_all_parts_once_in_the_order_of_import(small_torch: Path, use: str, expected: list[str]) -> None:
    program = f"""
assert torch.loaded == [], torch.loaded
assert finders[0] == '_PostponedParts'
{use}
assert torch.loaded == {expected}, torch.loaded
torch.export.shapes, torch._refs, torch.ao
assert torch.cond(1) == 2 and torch.cond is sys.modules['torch._higher_order_ops'].cond
assert type(torch.export) is type(sys) and torch.export.__spec__.loader.__class__.__name__ == 'SourceFileLoader'
assert torch.export.shapes.__spec__.name == 'torch.export.shapes'
assert torch.loaded == {expected}, torch.loaded
assert len(sys.meta_path) == len(finders) - 1
"""
    run(small_torch, program)


def test_looking_at_all_modules_loads_nothing(small_torch: Path) -> None:
    program = """
for module in [torch, torch.export, torch.ao]:
    [getattr(module, name, None) for name in ('__name__', '__doc__', '__file__', '__spec__', '__wrapped__')]
assert torch.export.__file__.endswith('__init__.py')
assert torch.loaded == [], torch.loaded
"""
    run(small_torch, program)


def test_an_attribute_that_torch_does_not_have_is_still_an_error(small_torch: Path) -> None:
    program = """
try:
    torch.nothing_of_the_kind
except AttributeError as error:
    print(error)
"""
    assert "nothing_of_the_kind" in run(small_torch, program)


@pytest.mark.parametrize("version", ["2.10.0", "2.99.0", "unknown"])
def test_a_torch_of_another_version_is_imported_whole(tmp_path: Path, version: str) -> None:
    write_package(tmp_path, {**FILES, "version.py": f"__version__ = '{version}'\n"})
    run(tmp_path, f"assert torch.loaded == {ALL_LOADED}, torch.loaded\nassert '_PostponedParts' not in finders")


@pytest.mark.parametrize(("device", "is_postponed"), [("auto", False), ("cuda", False), ("cpu", True)])
def test_a_torch_that_may_run_on_a_gpu_is_imported_whole(tmp_path: Path, device: str, is_postponed: bool) -> None:
    write_package(tmp_path, {**FILES, "lib/libtorch_cuda.so": ""})
    run(tmp_path, f"assert (torch.loaded == []) is {is_postponed}, torch.loaded", device)


def test_a_part_that_fails_says_so_at_each_use_and_torch_goes_on(tmp_path: Path) -> None:
    write_package(tmp_path, {**FILES, "export/shapes.py": "raise OSError('the disk is gone')"})
    program = """
for _ in range(2):
    try:
        torch.export.Dim
    except OSError as error:
        print(error)
"""
    assert run(tmp_path, program) == "the disk is gone\nthe disk is gone"


def test_an_import_that_fails_leaves_no_finder_behind(tmp_path: Path) -> None:
    write_package(tmp_path, {**FILES, "__init__.py": "raise OSError('no such library')"})
    program = """
import sys
from ratoon.engine.processes.torch_parts import without_unused_parts
try:
    with without_unused_parts("cpu"):
        import torch
except OSError:
    print([type(finder).__name__ for finder in sys.meta_path].count('_PostponedParts'))
"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout == "0\n", done.stderr


REAL = """
import os, sys
from ratoon.engine.processes.torch_parts import FIRST_VERSION, LAST_VERSION, without_unused_parts
with without_unused_parts("cpu"):
    import torch
assert torch.ones(2, 3).softmax(1).sum().item() == 2
if FIRST_VERSION <= tuple(map(int, torch.__version__.split(".")[:2])) <= LAST_VERSION:
    for name in ("torch._prims", "torch._dynamo", "torch._subclasses", "sympy"):
        assert name not in sys.modules, name
{use}
assert torch.vmap(lambda x: 2 * x)(torch.ones(3)).tolist() == [2, 2, 2]
assert torch._refs.__name__ == "torch._refs"
assert "_PostponedParts" not in [type(finder).__name__ for finder in sys.meta_path]
expected = torch.nn.functional.linear(torch.empty(2, 3, device="meta"), torch.empty(4, 3, device="meta"))
assert expected.shape == (2, 4)
program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
assert "linear" in str(program.graph)
"""


@pytest.mark.parametrize("use", ["", "torch.rand(2, generator=torch.Generator().manual_seed(1))"])
@pytest.mark.full
@pytest.mark.slow
def test_torch_itself_works_without_its_parts_and_with_them(use: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", REAL.replace("{use}", use)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
