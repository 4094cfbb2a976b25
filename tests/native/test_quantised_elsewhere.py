"""Products with quantised weights, built for every instruction set and run as a program of their own: the same bits.

Sets of the other architecture run under qemu-user (Debian's package of that name); the compiler is that of the build,
`ziglang`, in this environment or by RATOON_TEST_ZIG ("/path/to/python -m ziglang").
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ratoon.layers import native

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "ratoon" / "layers" / "native"
PROGRAM = Path(__file__).with_name("quantised_test.c")
SOURCES = [*sorted(KERNELS.glob("quantised*.c")), KERNELS / "rows.c", KERNELS / "threads.c", PROGRAM]
FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-std=c11", "-fno-sanitize=all", "-g0", "-Wall", "-Werror"]
CHECKSUM = "checksum 1206585fc8578def"  # of the definition's results, on any machine
SETS = {
    "avx512vnni": ("x86_64", "x86_64_v4+avx512vnni"),
    "avx512": ("x86_64", "x86_64_v4"),
    "avx2": ("x86_64", "x86_64_v3"),
    "plain": ("x86_64", "x86_64"),
    "neon": ("aarch64", "neoverse_n1-fullfp16-dotprod-lse"),
    "neondot": ("aarch64", "neoverse_n1-fullfp16-lse"),
}
LIMIT = 600  # seconds: the first build for a target compiles its C library too

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.system() != "Linux", reason="the programs are built for Linux"),
]


def compiler() -> list[str]:
    if named := os.environ.get("RATOON_TEST_ZIG"):
        return shlex.split(named)
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("the compiler of the build is not here; pip install ziglang")
    return [sys.executable, "-m", "ziglang"]


def runner(architecture: str, kernel_set: str) -> list[str]:
    """How a program for this architecture is started here."""
    own = {"arm64": "aarch64"}.get(platform.machine(), platform.machine())
    if own == architecture:
        if kernel_set != "plain" and kernel_set not in native._supported_sets():
            pytest.skip(f"this processor can't run {kernel_set}")
        return []
    emulator = shutil.which(f"qemu-{architecture}") or shutil.which(f"qemu-{architecture}-static")
    if emulator is None:
        pytest.skip(f"no qemu-{architecture}; apt-get install qemu-user")
    if kernel_set.startswith("avx512"):
        pytest.skip("qemu does not emulate AVX-512")
    return [emulator, "-cpu", "max"]


@pytest.mark.parametrize("kernel_set", SETS)
def test_every_instruction_set_gives_the_bits_of_the_definition(kernel_set: str, tmp_path: Path) -> None:
    architecture, cpu = SETS[kernel_set]
    start, program = runner(architecture, kernel_set), tmp_path / "quantised_test"
    target = f"{architecture}-linux-musl"  # linked statically, so that the emulator needs no libraries
    build = [*compiler(), "cc", "-target", target, f"-mcpu={cpu}", *FLAGS, f"-I{KERNELS}", *map(str, SOURCES)]
    subprocess.run([*build, "-o", str(program), "-lm", "-lpthread"], check=True, timeout=LIMIT)
    done = subprocess.run([*start, str(program)], capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout.strip()) == (0, CHECKSUM), done.stdout + done.stderr
