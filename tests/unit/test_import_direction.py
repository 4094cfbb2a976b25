"""The rooms and who may import whom: parsed from the source, so that an upward import can't hide in a function."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ratoon"

# A room may import the rooms named here, and whatever those may import. Everybody may import `observe`.
BELOW = {
    "core": (),
    "observe": ("core",),
    "memory": ("core",),
    "scheduling": ("memory",),
    "layers": ("core",),
    "attention": ("layers",),
    "models": ("layers",),
    "execution": ("models", "attention"),
    "distributed": ("execution",),
    "media": ("layers",),  # of which it has the kernels alone: see below
    "engine": ("scheduling", "distributed", "media"),
    "transcription": ("engine",),
    "console": (),
    "api": ("transcription",),
    "benchmarks": ("api",),
}
WITHOUT_TORCH = ("core", "observe", "memory", "scheduling")


def allowed(room: str) -> set[str]:
    rooms = {room, "observe", "core"} if room != "core" else {"core"}
    for lower in BELOW[room]:
        rooms |= allowed(lower)
    return rooms


@functools.cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Every import in a file, wherever it stands: (line, dotted name)."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            found.append((node.lineno, node.module or ""))
    return found


def room_files(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


def test_every_folder_is_a_room_with_a_place_in_the_order():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert folders == set(BELOW)


@pytest.mark.parametrize("room", BELOW)
def test_no_room_imports_upwards(room):
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for path in room_files(room)
        for line, name in imports(path)
        if name.startswith("ratoon.") and name != "ratoon.version" and name.split(".")[1] not in allowed(room)
    ]
    assert not wrong, f"{room} may import {sorted(allowed(room))}"


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_accounting_and_policy_know_no_tensors(room):
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for path in room_files(room)
        for line, name in imports(path)
        if name.split(".")[0] in ("torch", "numpy", "transformers")
    ]
    assert not wrong


def test_media_are_read_without_torch():
    """A server's process that takes requests has no torch, and neither have those that decode images."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for path in room_files("media")
        for line, name in imports(path)
        if name.split(".")[0] in ("torch", "torchvision", "transformers")
    ]
    assert not wrong


def test_media_have_nothing_of_the_layers_but_the_kernels():
    """The kernels are plain C, and their module needs no torch."""
    used = {name for path in room_files("media") for _, name in imports(path) if name.startswith("ratoon.layers")}
    assert used == {"ratoon.layers.native"}
    assert not [name for _, name in imports(PACKAGE / "layers/native/__init__.py") if name.split(".")[0] == "torch"]


def test_transformers_is_an_oracle_and_one_backend():
    files = sorted(PACKAGE.rglob("*.py"))
    users = {path.name for path in files for _, name in imports(path) if name.split(".")[0] == "transformers"}
    assert users == {"transformers_model.py", "transformers_trace.py", "transformers_weights.py"}


def test_nothing_is_pickled():
    """Not even between processes of our own: what is unpickled can run any code."""
    unsafe = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, module in imports(path)
        if module.partition(".")[0] in unsafe
    ]
    assert found == []


def test_importing_the_package_loads_nothing_slow():
    slow = ("torch", "numpy", "tokenizers", "rich", "jinja2")
    code = f"import sys, ratoon, ratoon.cli; print([name for name in {slow} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
