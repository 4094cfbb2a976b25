"""Build hook: compiles the CPU kernels (plain C, no Python headers) into shared libraries of the package.

The compiler comes from the build requirement `ziglang`, so that a machine without one builds too, and builds for other
platforms (RATOON_WHEEL_TARGET); RATOON_CC names another compiler. One library for each instruction set; the package
picks one when it runs. A platform that is not in the table gets none, and Ratoon then computes with torch.
"""

from __future__ import annotations

import os
import platform
import runpy
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("ratoon/layers/native")
FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-std=c11", "-fno-sanitize=all", "-g0"]
TARGET_VARIABLE = "RATOON_WHEEL_TARGET"  # a key of TARGETS in the place of this machine's
COMPILER_VARIABLE = "RATOON_CC"
REQUIRED_VARIABLE = "RATOON_REQUIRE_KERNELS"  # set: kernels that can't be built are an error, not a warning


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
        native = Path(self.root) / NATIVE
        sources = sorted(native.glob("*.c"))
        if version == "editable":
            folder = native
            for stale in native.glob("kernels_*"):
                stale.unlink()
        else:
            self._built = tempfile.TemporaryDirectory(prefix="ratoon-kernels-")
            folder = Path(self._built.name)
        for variant, (zig_target, cpu) in target.variants.items():
            library = folder / f"kernels_{variant}{target.suffix}"
            if self._compile(sources, library, zig_target, cpu) and version != "editable":
                build_data["force_include"][str(library)] = str(NATIVE / library.name)
        build_data["pure_python"] = False
        build_data["infer_tag"] = False
        build_data["tag"] = f"py3-none-{_platform_tag(target)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._built is not None:
            self._built.cleanup()

    def _compile(self, sources: list[Path], library: Path, zig_target: str, cpu: str) -> bool:
        if COMPILER_VARIABLE in os.environ:
            command = [*shlex.split(os.environ[COMPILER_VARIABLE]), *FLAGS[:6]]
        else:
            command = [sys.executable, "-m", "ziglang", "cc", "-target", zig_target, f"-mcpu={cpu}", *FLAGS]
        about = runpy.run_path(str(sources[0].with_name("sources.py")))
        command.append(f"-D{about['MACRO']}={about['digest_of'](sources[0].parent)}")
        command += [*map(str, sources), "-o", str(library), "-lm", "-lpthread"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", "") or str(error)
            if os.environ.get(REQUIRED_VARIABLE):
                raise RuntimeError(f"{library.name} was not built:\n{detail}") from error
            self.app.display_warning(f"{library.name} was not built, torch will be used instead:\n{detail}")
            return False
        return True


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
