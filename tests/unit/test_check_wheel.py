"""The check behind `make wheel`: wheels whose kernels do not fit their tag are refused. Nothing is compiled here."""

from __future__ import annotations

import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / ".ci" / "check_wheel.py"
FOREIGN = "aarch64" if platform.machine() == "x86_64" else "x86_64"
ELF_MACHINES = {"x86_64": 0x3E, "aarch64": 0xB7}
KERNELS = "ratoon/layers/native/kernels_any.so"


def elf(machine: str, glibc: str = "2.28") -> bytes:
    return b"\x7fELF".ljust(18, b"\0") + ELF_MACHINES[machine].to_bytes(2, "little") + f"GLIBC_{glibc}".encode()


def check(folder: Path, tag: str, files: dict[str, bytes]) -> subprocess.CompletedProcess[str]:
    path = folder / f"ratoon-0.1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return subprocess.run([sys.executable, CHECK, path], capture_output=True, text=True, timeout=120)


def test_a_wheel_for_another_platform_is_checked_and_not_installed(tmp_path: Path) -> None:
    done = check(tmp_path, f"py3-none-manylinux_2_28_{FOREIGN}", {KERNELS: elf(FOREIGN)})
    assert (done.returncode, done.stderr) == (0, "")
    assert "kernels_any.so; for another platform, not installed" in done.stdout


@pytest.mark.parametrize(
    ("tag", "files", "said"),
    [
        ("py3-none-any", {KERNELS: elf(FOREIGN)}, "expected the tag py3-none of manylinux or macosx"),
        ("cp311-cp311-manylinux_2_28_x86_64", {KERNELS: elf("x86_64")}, "expected the tag py3-none"),
        ("py3-none-manylinux_2_28_x86_64", {"ratoon/__init__.py": b""}, "holds no kernels"),
        ("py3-none-manylinux_2_28_x86_64", {KERNELS: elf("aarch64")}, "is not a library for Linux on x86_64"),
        ("py3-none-manylinux_2_28_aarch64", {KERNELS: elf("aarch64", "2.34")}, "needs glibc 2.34"),
        ("py3-none-macosx_11_0_arm64", {KERNELS: elf("aarch64")}, "is not a library for macOS on arm64"),
    ],
)
def test_a_wheel_whose_kernels_do_not_fit_its_tag_is_refused(
    tmp_path: Path, tag: str, files: dict[str, bytes], said: str
) -> None:
    done = check(tmp_path, tag, files)
    assert done.returncode == 1 and said in done.stderr
