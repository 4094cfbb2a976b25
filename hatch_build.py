"""Build hook: compiles the CPU kernels (plain C, no Python headers) into shared libraries of the package.

The compiler comes from the build requirement `ziglang`, so that a machine without one builds too, and builds for other
platforms (RATOON_WHEEL_TARGET); RATOON_CC names another compiler. One library for each instruction set, all compiled at
the same time; the package picks one when it runs. A platform that is not in the table gets none, and Ratoon then
computes with torch.

    python hatch_build.py [all|host]

compiles into the source tree and says what it does, which an installer does not show: all kernel sets of this platform,
or the one that this processor uses.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("ratoon/layers/native")
FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-std=c11", "-fno-sanitize=all", "-g0"]
TARGET_VARIABLE = "RATOON_WHEEL_TARGET"  # a key of TARGETS in the place of this machine's
COMPILER_VARIABLE = "RATOON_CC"
REQUIRED_VARIABLE = "RATOON_REQUIRE_KERNELS"  # set: kernels that can't be built are an error, not a warning
SETS_VARIABLE = "RATOON_BUILD_KERNELS"  # of an editable installation: one of SETS_CHOICES
SETS_CHOICES = ("all", "host", "none")  # "none": those in the source tree stay as they are


class Target(NamedTuple):
    """A platform that kernels are built for."""

    tag: str  # platform tag of the wheel
    suffix: str
    variants: dict[str, tuple[str, str]]  # kernel set → (zig target, zig cpu)


TARGETS = {
    "linux-aarch64": Target(
        "manylinux_2_28_aarch64",
        ".so",
        {
            "neon": ("aarch64-linux-gnu.2.28", "neoverse_n1-fullfp16-dotprod-lse"),
            "neondot": ("aarch64-linux-gnu.2.28", "neoverse_n1-fullfp16-lse"),
            "neoni8mm": ("aarch64-linux-gnu.2.28", "neoverse_n1-fullfp16-lse+i8mm"),
        },
    ),
    "linux-x86_64": Target(
        "manylinux_2_28_x86_64",
        ".so",
        {
            "avx2": ("x86_64-linux-gnu.2.28", "x86_64_v3"),
            "avx512": ("x86_64-linux-gnu.2.28", "x86_64_v4"),
            "avx512vnni": ("x86_64-linux-gnu.2.28", "x86_64_v4+avx512vnni"),
            "avx512amx": ("x86_64-linux-gnu.2.28", "x86_64_v4+avx512vnni+amx_tile+amx_int8"),
        },
    ),
    "darwin-arm64": Target("macosx_11_0_arm64", ".dylib", {"neon": ("aarch64-macos.11.0", "apple_m1")}),
}


class NativeKernels(BuildHookInterface):
    """For a wheel the kernels are built in a temporary folder, so that one for another platform leaves the source tree
    as it is. An editable installation runs from the source tree and has them there."""

    _built: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        target = _host_target() if version == "editable" else _chosen_target()
        if self.target_name != "wheel" or target is None:
            return
        root = Path(self.root)
        if version == "editable":
            compile_into_source_tree(root, target, _chosen_sets(), self.app.display_warning)
        else:
            self._built = tempfile.TemporaryDirectory(prefix="ratoon-kernels-")
            for library in compile_sets(
                root, target, list(target.variants), Path(self._built.name), self.app.display_warning
            ):
                build_data["force_include"][str(library)] = str(NATIVE / library.name)
        build_data["pure_python"] = False
        build_data["infer_tag"] = False
        build_data["tag"] = f"py3-none-{_platform_tag(target)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._built is not None:
            self._built.cleanup()


def compile_into_source_tree(root: Path, target: Target, sets: str, warn: Callable[[str], None]) -> list[Path]:
    """Replaces the libraries that an editable installation uses. Returns the new ones."""
    if sets == "none":
        return []
    native = root / NATIVE
    for stale in native.glob("kernels_*"):
        stale.unlink()
    if sets == "all":
        return compile_sets(root, target, list(target.variants), native, warn)
    for kernel_set in _sets_of_this_processor(root):  # best first
        for library in compile_sets(root, target, [kernel_set], native, warn):
            if ctypes.CDLL(str(library)).ratoon_kernels_usable():
                return [library]
            library.unlink()  # the processor has the instructions, and the system does not allow them
    return []


def compile_sets(
    root: Path, target: Target, kernel_sets: list[str], folder: Path, warn: Callable[[str], None]
) -> list[Path]:
    """One library for each kernel set, compiled side by side. Returns those that could be built."""

    def compile_set(kernel_set: str) -> Path | None:
        library = folder / f"kernels_{kernel_set}{target.suffix}"
        return library if _compile(root / NATIVE, library, *target.variants[kernel_set], warn) else None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [library for library in pool.map(compile_set, kernel_sets) if library is not None]


def _compile(native: Path, library: Path, zig_target: str, cpu: str, warn: Callable[[str], None]) -> bool:
    if COMPILER_VARIABLE in os.environ:
        command = [*shlex.split(os.environ[COMPILER_VARIABLE]), *FLAGS[:6]]
    else:
        command = [sys.executable, "-m", "ziglang", "cc", "-target", zig_target, f"-mcpu={cpu}", *FLAGS]
    about = runpy.run_path(str(native / "sources.py"))
    command.append(f"-D{about['MACRO']}={about['digest_of'](native)}")
    command += [*map(str, sorted(native.glob("*.c"))), "-o", str(library), "-lm", "-lpthread"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        if os.environ.get(REQUIRED_VARIABLE):
            raise RuntimeError(f"{library.name} was not built:\n{detail}") from error
        warn(f"{library.name} was not built, torch will be used instead:\n{detail}")
        return False
    return True


def _sets_of_this_processor(root: Path) -> list[str]:
    """The kernel sets whose instructions this processor has, best first, as the package itself finds them."""
    sys.path.insert(0, str(root))
    try:
        return list(importlib.import_module("ratoon.layers.native")._supported_sets())
    finally:
        sys.path.remove(str(root))


def _chosen_sets() -> str:
    """Which kernel sets the environment asks for, in an editable installation."""
    named = os.environ.get(SETS_VARIABLE) or "all"
    if named not in SETS_CHOICES:
        raise ValueError(f"{SETS_VARIABLE}: {named!r} is unknown; expected one of {', '.join(SETS_CHOICES)}")
    return named


def _host_target() -> Target | None:
    """This machine's platform; None where no kernels are known for it."""
    return TARGETS.get(f"{platform.system().lower()}-{platform.machine()}")


def _chosen_target() -> Target | None:
    """The platform that the environment names, or this one."""
    named = os.environ.get(TARGET_VARIABLE)
    if not named:
        return _host_target()
    if named not in TARGETS:
        raise ValueError(f"{TARGET_VARIABLE}: {named!r} is unknown; expected one of {', '.join(TARGETS)}")
    return TARGETS[named]


def _platform_tag(target: Target) -> str:
    """Another compiler links against this machine's C library, which may be newer than the tag of the table says."""
    if COMPILER_VARIABLE in os.environ and target.tag.startswith("manylinux"):
        return f"linux_{platform.machine()}"
    return target.tag


def main(sets: str) -> None:
    root, target = Path(__file__).parent, _host_target()
    if target is None:
        print(f"There are no kernels for {platform.system()} on {platform.machine()}: torch will be used instead.")
        return
    num_files = len(list((root / NATIVE).glob("*.c")))
    whose = "this processor's kernels" if sets == "host" else f"{len(target.variants)} kernel sets side by side"
    print(f"compiling {whose} from {num_files} C files", flush=True)
    begin = time.monotonic()
    for library in compile_into_source_tree(root, target, sets, lambda warning: print(warning, file=sys.stderr)):
        print(f"  {library.name}")
    print(f"compiled in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[1:] not in ([], ["all"], ["host"]):
        sys.exit("usage: hatch_build.py [all|host]")
    main(*sys.argv[1:] or ["all"])
