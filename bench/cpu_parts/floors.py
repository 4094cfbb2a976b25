"""What the machine can do at best (limits.c), and how much of it a measured rate is."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from export_hf import CACHE_FOLDER

SOURCE = Path(__file__).resolve().parent.parent / "limits.c"
COMPILERS = ("cc", "gcc", "clang")


class Floors(NamedTuple):
    """Bytes and operations a second, of all threads together."""

    read: float  # of a buffer as large as the weights, again and again
    float32: float
    int8: float  # 0: unknown
    int8_kind: str

    def describe(self) -> str:
        shown = f"{self.read / 1e9:.1f} GB/s read, float32 {self.float32 / 1e9:.0f} GFLOP/s"
        return shown + (f", int8 {self.int8 / 1e9:.0f} GOP/s ({self.int8_kind})" if self.int8 else "")


def measure_floors(threads: int, weight_bytes: int, program: str | None) -> Floors | None:
    """With a program that is there, or one that a C compiler makes; None where there is neither."""
    path = program or _compile()
    if path is None:
        return None
    command = [path, str(threads), str(max(weight_bytes >> 20, 1))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return Floors(**json.loads(done.stdout)) if done.returncode == 0 else None


def _compile() -> str | None:
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        return None
    target = CACHE_FOLDER / f"limits-{hashlib.blake2b(SOURCE.read_bytes(), digest_size=4).hexdigest()}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        native = ["-mcpu=native"] if platform.machine() == "aarch64" else ["-march=native"]
        if platform.machine() == "x86_64":
            native.append("-mprefer-vector-width=512")
        flags = ["-O3", "-ffp-contract=fast", "-pthread", *native]
        done = subprocess.run([compiler, *flags, str(SOURCE), "-o", str(target)], capture_output=True, timeout=120)
        if done.returncode != 0:
            return None
    return str(target)


def shares(floors: Floors, values: dict[str, float], facts: dict[str, Any]) -> dict[str, float]:
    """Of a decode step: bytes of weights a second, of what can be read. Of a prefill: operations of the products with
    the layers' weights, without attention and head, of what is possible."""
    found = {}
    if "single-decode" in values:
        found["decode step, of the bandwidth"] = values["single-decode"] * facts["weight_bytes"] / floors.read
    rate = floors.int8 if facts["kind"] == "int8" else floors.float32
    if "prefill" in values and rate:
        operations = 2 * facts["num_product_weights"] * facts["prefill_tokens"]
        found[f"prefill, of the {facts['kind']} rate"] = operations / values["prefill"] / rate
    return found
