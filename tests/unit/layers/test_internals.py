"""What reaches into torch and Triton stands in one file for each, and the plain way works where they are unknown."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ratoon.layers import torch_internals

PACKAGE = Path(__file__).parents[3] / "ratoon"
TRITON = "layers/triton/internals.py"
TORCH = ("layers/torch_internals.py", "engine/processes/torch_parts.py")
PLAIN = """
import sys
import torch, triton
triton.__version__ = "99.1.0"  # a version that was not tested
from ratoon.layers.triton import internals
assert not internals.IS_KNOWN
from ratoon.layers.gpu import has_gluon, has_wgmma
assert not has_gluon() and not has_wgmma()
from ratoon.layers.cuda_ops import CudaOps
from ratoon.layers.ops import RMSWeights
from ratoon.layers.product_choices import Panel, Stream
ops = CudaOps()
weight = torch.randn(1024, 1024)
assert not any(isinstance(choice, Panel | Stream) for choice in ops.choices.of("linear", weight.bfloat16()))
x = torch.randn(3, 64)
norm = torch.rand(64)
expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm
assert torch.allclose(ops.rms_norm(x, norm, 1e-6), expected, atol=1e-5)
from ratoon.layers.triton.compilation import compile_launches, send_launches
assert compile_launches(lambda: 1 / 0, 1, print) == 0
send_launches(lambda: 1 / 0, None)
from ratoon.layers.triton import compile_server
compile_server.main()
from ratoon.execution.passes.cuda_driver import import_triton
assert import_triton() is None
assert "ratoon.layers.triton.panel" not in sys.modules
print("plain")
"""


def imports_of(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_one_file_knows_the_inside_of_triton() -> None:
    inside = re.compile(r"triton\.(_C|runtime|compiler|backends|knobs|AsyncCompileMode|.*\._)")
    for path in PACKAGE.rglob("*.py"):
        if str(path.relative_to(PACKAGE)) != TRITON and "triton" in path.read_text():
            found = [name for name in imports_of(path) if inside.match(name)]
            assert not found, f"{path} imports {found}; {TRITON} is the place for it"
            assert not re.search(r"\btriton\.(knobs|_C|runtime|compiler\.|AsyncCompileMode)", path.read_text()), path


def test_two_files_know_the_inside_of_torch() -> None:
    for path in PACKAGE.rglob("*.py"):
        if str(path.relative_to(PACKAGE)) not in TORCH:
            text = path.read_text()
            assert not re.search(r"\btorch\.((\w+\.)*_[a-z]|_C\b)", text), path
            assert not re.search(r"\bdef _should_skip_dynamo\b", text), f"{path}: a hook of torch's"


@pytest.mark.slow  # a process of its own, or an engine
@pytest.mark.full
def test_kernels_run_the_plain_way_with_a_triton_that_is_not_known() -> None:
    pytest.importorskip("triton")
    environment = {"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0 and done.stdout == "plain\n", done.stderr[-2000:]


def test_without_the_inside_of_torch_the_answers_are_careful(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_internals.num_modes() == 0
    with torch.device("meta"):
        assert torch_internals.num_modes() > 0
    monkeypatch.delattr(torch._C, "_len_torch_function_stack")
    assert torch_internals.num_modes() == 1
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool", raising=False)
    torch_internals.end_allocation_to_pool(0, (0, 0))  # no error


@pytest.mark.parametrize("with_bias", [True, False])
def test_products_in_8_bits_are_those_of_the_library_without_it_too(with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(5, 32, generator=generator), torch.randn(16, 32, generator=generator)
    bias = torch.randn(16, generator=generator).bfloat16() if with_bias else None
    x_scales, weight_scales = x.abs().amax(1, keepdim=True) / 448, weight.abs().amax(1)[None, :] / 448
    numbers = (x / x_scales).to(torch.float8_e4m3fn), (weight.t() / weight_scales).to(torch.float8_e4m3fn)
    found = torch_internals.plain_scaled_product(*numbers, x_scales, weight_scales, bias, torch.bfloat16)
    expected = x @ weight.t() + (0 if bias is None else bias.float())
    assert found.dtype is torch.bfloat16
    # Each factor is rounded to 3 bits behind the leading one: by 1/16 at most of its size.
    bound = (x.abs() @ weight.abs().t()) * (2 / 16 + 1 / 256) + expected.abs() / 256
    assert ((found.float() - expected).abs() <= bound).all()


def test_the_library_is_asked_for_products_in_8_bits_where_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, scales = torch.ones(1, 16).to(torch.float8_e4m3fn), torch.ones(1, 1)
    monkeypatch.setattr(torch_internals, "_scaled_mm", lambda *tensors, out_dtype, use_fast_accum: out_dtype)
    arguments = numbers, numbers.t(), scales, scales, None, torch.bfloat16
    assert torch_internals.scaled_product(*arguments) is torch.bfloat16
    monkeypatch.setattr(torch_internals, "_scaled_mm", None)
    assert torch_internals.scaled_product(*arguments).tolist() == [[16.0]]


def test_the_bounds_of_the_package_are_those_of_the_files() -> None:
    project = (PACKAGE.parent / "pyproject.toml").read_text()
    internals = (PACKAGE / TRITON).read_text()
    (tested,) = re.findall(r'^TESTED = "(\d+\.\d+)"', internals, re.MULTILINE)
    major, minor = map(int, tested.split("."))
    assert project.count(f"triton>={tested},<{major}.{minor + 1};") == 2
    parts = (PACKAGE / TORCH[1]).read_text()
    (last,) = re.findall(r"LAST_VERSION = .*\((\d+, \d+)\)$", parts, re.MULTILINE)
    major, minor = map(int, last.split(", "))
    assert f"<{major}.{minor + 1}" in re.findall(r'"torch([^"]*)"', project)[0]
