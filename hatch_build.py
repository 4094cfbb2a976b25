"""Build hook: compiles the CPU kernels (plain C, no Python headers) into shared libraries inside the package.

The compiler comes from the build requirement `ziglang`, so that a machine without one builds too; RATOON_CC names
another. One library for each instruction set; the package picks one when it runs. A platform that is not in the table
gets none, and Ratoon then computes with torch.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("ratoon/layers/native")
FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-std=c11", "-fno-sanitize=all", "-g0"]
# (system, machine) → {variant: (zig target, zig cpu)}
VARIANTS: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("Linux", "aarch64"): {"neon": ("aarch64-linux-gnu.2.28", "neoverse_n1-fullfp16-dotprod-lse")},
    ("Linux", "x86_64"): {
        "avx2": ("x86_64-linux-gnu.2.28", "x86_64_v3"),
        "avx512": ("x86_64-linux-gnu.2.28", "x86_64_v4"),
    },
    ("Darwin", "arm64"): {"neon": ("aarch64-macos", "apple_m1")},
}


class NativeKernels(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        sources = sorted((root / NATIVE).glob("*.c"))
        variants = VARIANTS.get((platform.system(), platform.machine()), {})
        if not sources or not variants:
            return
        suffix = ".dylib" if platform.system() == "Darwin" else ".so"
        for stale in (root / NATIVE).glob("kernels_*"):
            stale.unlink()
        for variant, (target, cpu) in variants.items():
            output = root / NATIVE / f"kernels_{variant}{suffix}"
            if "RATOON_CC" in os.environ:
                command = [*shlex.split(os.environ["RATOON_CC"]), *FLAGS[:6]]
            else:
                command = [sys.executable, "-m", "ziglang", "cc", "-target", target, f"-mcpu={cpu}", *FLAGS]
            command += [*map(str, sources), "-o", str(output), "-lm", "-lpthread"]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                detail = getattr(error, "stderr", "") or str(error)
                self.app.display_warning(
                    f"CPU kernels ({variant}) were not built, torch will be used instead:\n{detail}"
                )
        build_data["pure_python"] = False
        build_data["infer_tag"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"


def _platform_tag() -> str:
    if platform.system() == "Darwin":
        return "macosx_11_0_arm64"
    return f"manylinux_2_28_{platform.machine()}"
