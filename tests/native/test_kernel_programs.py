"""Every kernel, built for every instruction set by the compiler of the build, against references in double precision.

The C files beside this one are one program, which draws sizes and numbers from a seed. For the other architecture it
runs under qemu-user (Debian's package of that name). The compiler is `ziglang`, in this environment or by
RATOON_TEST_ZIG ("/path/to/python -m ziglang"). Most of the time goes into compiling kernels: `make test` takes the
library that the build has made for this processor, and `make test-all` compiles each set, where a warning is an error.
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
from collections.abc import Sequence
from pathlib import Path

import pytest

from ratoon.layers import native
from ratoon.layers.native.sources import digest_of
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
    """Kernels with the flags of the build."""
    kernels = folder / "kernels"
    kernels.mkdir()
    flags = [flag for flag in HOOK.FLAGS if flag not in ("-shared", "-g0")]
    sources = map(str, sorted(KERNELS.glob("*.c")))
    run([*compile_for(kernel_set), f"-mcpu={SETS[kernel_set][1]}", *flags, *STRICT, "-c", *sources], kernels)
    return link(kernel_set, sorted(kernels.glob("*.o")), folder)


def link(kernel_set: str, kernels: list[Path], folder: Path) -> Path:
    """The program with these kernels. The references in double precision are the same for all sets of an architecture,
    and so is the C library: the compiler keeps both."""
    references = folder / "references"
    references.mkdir()
    sources = map(str, sorted(PROGRAM.glob("*.c")))
    common = compile_for(kernel_set)
    run([*common, "-O1", "-ffp-contract=off", "-std=c11", *STRICT, f"-I{KERNELS}", "-c", *sources], references)
    objects = map(str, [*kernels, *sorted(references.glob("*.o"))])
    run([*common, "-O1", *objects, "-o", "program", f"-Wl,-rpath,{KERNELS}", "-lm", "-lpthread"], folder)
    return folder / "program"


def compile_for(kernel_set: str) -> list[str]:
    architecture = SETS[kernel_set][0]
    # For another architecture it is linked statically, so that the emulator needs no libraries.
    library = "gnu.2.28" if architecture == OWN else "musl"
    return [*compiler(), "-target", f"{architecture}-linux-{library}", "-fno-sanitize=all", "-g0"]


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"


@pytest.mark.skipif(native.library() is None, reason="no kernels for this processor; `make setup` builds them")
def test_every_kernel_that_is_installed_is_as_exact_as_its_arithmetic_allows(tmp_path: Path) -> None:
    kernel_set = native.kernel_set_name()
    program = link(kernel_set, [KERNELS / f"kernels_{kernel_set}.so"], tmp_path)
    check(kernel_set, program, digest_of(KERNELS))


@pytest.mark.full
@pytest.mark.parametrize("kernel_set", SETS)
def test_every_kernel_is_as_exact_as_its_arithmetic_allows(kernel_set: str, tmp_path: Path) -> None:
    start = runner(kernel_set)
    check(kernel_set, build(kernel_set, tmp_path), "unknown", start)


def check(kernel_set: str, program: Path, digest: str, start: Sequence[str] = ()) -> None:
    seed = str(seed_of(f"kernels of {kernel_set}"))
    print(f"seed {seed}")  # pytest shows it with a failure, and -rA always
    # qemu reads whole vectors for instructions of AVX that read a part, also behind the end of memory.
    padding = "64" if start and SETS[kernel_set][0] == "x86_64" else "0"
    done = subprocess.run([*start, str(program), seed, padding, digest], capture_output=True, text=True, timeout=LIMIT)
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
        "block file",
    ]
