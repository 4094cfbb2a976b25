"""Checks a wheel: its tag, that the kernels in it are for the platform of the tag, and that they load once installed.

    python .ci/check_wheel.py WHEEL

The wheel is installed into a temporary folder without dependencies and with no compiler on the path. A wheel for
another platform is not installed; its kernels are looked at nevertheless. Exit code 1 and a line that says why, if not.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NATIVE = "ratoon/layers/native/"
ELF_MACHINES = {"x86_64": 0x3E, "aarch64": 0xB7}
MACHO_ARM64 = bytes.fromhex("cffaedfe0c000001")  # magic number and processor of a 64-bit file
LOAD = """
import sys, ratoon
from ratoon.layers import native
assert ratoon.__file__.startswith(sys.path[0]), f"imported from {ratoon.__file__}"
assert native.library() is not None or not native._supported_sets(), "the kernels do not load"
if native.library() is not None:
    assert native.library().ratoon_packed_size(64, 64) >= 64 * 64, "a kernel does not run"
print(native.kernel_set_name())
"""


def main(path: Path) -> None:
    match = re.fullmatch(
        r"ratoon-[^-]+-py3-none-(manylinux_(\d+)_(\d+)_(x86_64|aarch64)|macosx_11_0_arm64)\.whl", path.name
    )
    if match is None:
        sys.exit(f"{path.name}: expected the tag py3-none of manylinux or macosx")
    with zipfile.ZipFile(path) as wheel:
        kernels = {name: wheel.read(name) for name in wheel.namelist() if name.startswith(f"{NATIVE}kernels_")}
    if not kernels:
        sys.exit(f"{path.name}: holds no kernels")
    for name, content in kernels.items():
        if match[4] is None:
            fault = "" if content.startswith(MACHO_ARM64) else "is not a library for macOS on arm64"
        else:
            fault = fault_of_elf(content, match[4], (int(match[2]), int(match[3])))
        if fault:
            sys.exit(f"{path.name}: {name} {fault}")
    print(f"{path.name}: {', '.join(Path(name).name for name in kernels)}; {load(path, match[1])}")


def fault_of_elf(content: bytes, machine: str, newest_glibc: tuple[int, int]) -> str:
    """What is wrong with a library for Linux: another processor, or a C library newer than the tag says."""
    if not content.startswith(b"\x7fELF") or int.from_bytes(content[18:20], "little") != ELF_MACHINES[machine]:
        return f"is not a library for Linux on {machine}"
    needed = max(((int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", content)), default=(0, 0))
    return f"needs glibc {needed[0]}.{needed[1]}" if needed > newest_glibc else ""


def load(path: Path, tag: str) -> str:
    """Installs the wheel where this is its platform, and asks which kernels this processor gets."""
    system = "linux" if platform.system() == "Linux" else "macosx"
    if system not in tag or not tag.endswith(platform.machine()):
        return "for another platform, not installed"
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PATH": "/nonexistent", "PYTHONPATH": folder}
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
        for arguments in ([*install, "--target", folder, str(path.resolve())], ["-c", LOAD]):
            done = subprocess.run(
                [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True
            )
            if done.returncode != 0:
                sys.exit(f"{path.name}: {done.stderr.strip()}")
    return f"installed without a compiler, this processor gets {done.stdout.strip()}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: check_wheel.py WHEEL")
    main(Path(sys.argv[1]))
