"""Every kernel, built for every instruction set by the compiler of the build, against references in double precision.

The C files beside this one are one program, which draws sizes and numbers from a seed. For the other architecture it
runs under qemu-user (Debian's package of that name). The compiler is `ziglang`, in this environment or by
RATOON_TEST_ZIG ("/path/to/python -m ziglang").
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from ratoon.layers import native
from tests.seeds import seed_of

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "ratoon" / "layers" / "native"
PROGRAM = Path(__file__).parent
STRICT = ["-Wall", "-Werror"]
LIMIT = 900  # seconds: the first program for another architecture builds its C library too
OWN = {"arm64": "aarch64"}.get(platform.machine(), platform.machine())

pytestmark = [
    pytest.mark.slow,
    pytest.mark.drawn,
    pytest.mark.skipif(platform.system() != "Linux", reason="the programs are built for Linux"),
]


def build_hook() -> types.ModuleType:
    """hatch_build.py, which has the flags and the instruction sets. What it extends is there in a build alone."""
    interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, interface.__name__, interface)
        spec.loader.exec_module(module)
    return module


HOOK = build_hook()
# Kernel set → (architecture, processor in zig's terms). "plain": what another compiler builds without further flags.
SETS = {"plain": ("x86_64", "x86_64")} | {
    name: (architecture, cpu)
    for architecture in ("x86_64", "aarch64")
    for name, (_, cpu) in HOOK.TARGETS[f"linux-{architecture}"].variants.items()
}


def best_set() -> str:
    """The set that this processor takes."""
    return next(iter(native._supported_sets()), "plain")


def compiler() -> list[str]:
    if named := os.environ.get("RATOON_TEST_ZIG"):
        return [*shlex.split(named), "cc"]
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("the compiler of the build is not here; pip install ziglang")
    return [sys.executable, "-m", "ziglang", "cc"]


def emulator(architecture: str) -> list[str]:
    found = shutil.which(f"qemu-{architecture}") or shutil.which(f"qemu-{architecture}-static")
    if found is None:
        pytest.skip(f"no qemu-{architecture}; apt-get install qemu-user")
    return [found, "-cpu", "max"]


def runner(kernel_set: str) -> list[str]:
    """How a program with these instructions is started here: what comes before its name."""
    architecture = SETS[kernel_set][0]
    if architecture == OWN and (kernel_set == "plain" or kernel_set in native._supported_sets()):
        return []
    if kernel_set.startswith("avx512"):
        pytest.skip(f"this processor can't run {kernel_set}, and qemu does not emulate AVX-512")
    return emulator(architecture)


def build(kernel_set: str, folder: Path) -> Path:
    """Kernels with the flags of the build. The references in double precision are the same for all sets of an
    architecture, and so is the C library: only kernels are built anew for each."""
    architecture, cpu = SETS[kernel_set]
    # For another architecture it is linked statically, so that the emulator needs no libraries.
    library = "gnu.2.28" if architecture == OWN else "musl"
    common = [*compiler(), "-target", f"{architecture}-linux-{library}", "-fno-sanitize=all", "-g0"]
    kernels, references = folder / "kernels", folder / "references"
    kernels.mkdir()
    references.mkdir()
    flags = [flag for flag in HOOK.FLAGS if flag not in ("-shared", "-g0")]
    sources = map(str, sorted(KERNELS.glob("*.c")))
    run([*common, f"-mcpu={cpu}", *flags, *STRICT, "-c", *sources], kernels)
    sources = map(str, sorted(PROGRAM.glob("*.c")))
    run([*common, "-O1", "-ffp-contract=off", "-std=c11", *STRICT, f"-I{KERNELS}", "-c", *sources], references)
    objects = map(str, [*sorted(kernels.glob("*.o")), *sorted(references.glob("*.o"))])
    run([*common, "-O1", *objects, "-o", "program", "-lm", "-lpthread"], folder)
    return folder / "program"


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"


@pytest.mark.parametrize(
    "kernel_set",  # each is compiled, and those of the other architecture are emulated, which takes long
    [pytest.param(name, marks=() if name == best_set() else pytest.mark.full) for name in SETS],
)
def test_every_kernel_is_as_exact_as_its_arithmetic_allows(kernel_set: str, tmp_path: Path) -> None:
    start = runner(kernel_set)
    program, seed = build(kernel_set, tmp_path), str(seed_of(f"kernels of {kernel_set}"))
    print(f"seed {seed}")  # pytest shows it with a failure, and -rA always
    # qemu reads whole vectors for instructions of AVX that read a part, also behind the end of memory.
    padding = "64" if start and SETS[kernel_set][0] == "x86_64" else "0"
    done = subprocess.run([*start, str(program), seed, padding], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"seed {seed}, status {done.returncode}\n{done.stdout}{done.stderr}"
    sections = [line.removesuffix(": 0 wrong") for line in done.stdout.splitlines()]
    assert sections == [
        "threads",
        "linear",
        "mlp",
        "rows",
        "attention",
        "encode",
        "quantised",
        "program",
        "sampling",
        "repack",
        "attention in bf16",
        "embed",
        "inputs",
        "ranks",
        "low rank",
        "experts",
        "latent",
        "resize",
        "states",
    ]
