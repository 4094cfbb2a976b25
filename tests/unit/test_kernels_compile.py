"""Every Triton kernel compiles for the GPUs that it is written for, also where there is none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MAX_SHARED = 227 * 1024  # bytes that a block may have on compute capability 9.0
# Bytes of stack of kernels that are known to need some, also in loops: four accesses of some 540 instructions in a loop
# of products.
STACKS = {"prefill_kernel": 80}
# Kernels in Gluon, which no interpreter runs: by the part of the program that compiles them.
GLUON = {
    "attention": {"prefill_kernel"},
    "products": {"_factors_kernel", "_panel_kernel", "_stream_kernel", "_wide_kernel"},
}
GLUON["gluon"] = set.union(*GLUON.values())  # one shape of each
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def test_every_kernel_in_gluon_is_one_that_is_compiled_here():
    found = set()
    for path in (REPOSITORY / "ratoon").rglob("*.py"):
        found |= set(re.findall(r"^@gluon\.jit\b.*\ndef (\w+_kernel)\(", path.read_text(), re.MULTILINE))
    assert found == set.union(*GLUON.values())


@needs_triton
@pytest.mark.parametrize(
    "part",
    [
        "gluon",
        *(
            pytest.param(part, marks=pytest.mark.full)  # the interpreter runs these kernels in other tests
            for part in ("inputs", "attention", "latent", "states", "products", "experts", "choices")
        ),
    ],
)
@pytest.mark.slow
def test_kernels_compile_for_a_hopper_gpu_and_need_no_stack(part):
    program = REPOSITORY / "bench" / "gpu" / "compile_kernels.py"
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])  # packages may be there alone
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(program), part], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    kernels = [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines()]
    assert len(kernels) >= 6
    for kernel in kernels:
        stack = STACKS.get(kernel["kernel"], 0)
        assert kernel["stack"] <= stack and kernel["local"] == 0, f"registers were not enough: {kernel}"
        assert kernel["shared"] <= MAX_SHARED, kernel
    assert GLUON.get(part, set()) <= {kernel["kernel"] for kernel in kernels}
