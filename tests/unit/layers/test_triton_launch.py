"""Launches that skip Triton's own path: what they pass on, and when a compiled kernel may be used again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend

from ratoon.layers.triton import launch as module
from ratoon.layers.triton.launch import Launcher, launch, lay_out, write_launch

MEMORY = torch.zeros(256, dtype=torch.float32)


class CudaLauncher:
    """As Triton's, of that name; keeps what it is called with."""

    def __init__(self, kernel: FakeKernel, scratch: int) -> None:
        self.launch_cooperative_grid, self.launch_pdl = False, True
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        self.launch = lambda *args: kernel.direct.append(args)


@dataclass(eq=False)
class FakeKernel:
    """A kernel (x, y, varying, fixed, eps, BLOCK)."""

    scratch: int = 0
    by_triton: list[tuple[Any, ...]] = field(default_factory=list)
    direct: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = {"x": False, "y": False, "varying": True, "fixed": False, "eps": False}
        self.params = [SimpleNamespace(do_not_specialize=varies, is_constexpr=False) for varies in names.values()]
        self.params.append(SimpleNamespace(do_not_specialize=False, is_constexpr=True))
        self.fn = self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> Any:
            self.by_triton.append((grid, args, constants))
            compiled = SimpleNamespace(function=f"kernel {len(self.by_triton)}", packed_metadata="metadata")
            compiled._run = CudaLauncher(self, self.scratch)
            return compiled

        return run


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """A device, and the stream that is current there."""
    current = {"device": 0, "stream": 7}
    monkeypatch.setattr(module, "_can_prepare", lambda: True)
    monkeypatch.setattr(module, "current_device", lambda: current["device"])
    monkeypatch.setattr(module, "current_stream", lambda device: current["stream"])
    monkeypatch.setattr(module, "enter_hooks", [])
    monkeypatch.setattr(module, "exit_hooks", [])
    write_launch.cache_clear()
    yield current
    write_launch.cache_clear()


def test_the_second_launch_of_a_kind_goes_to_the_compiled_kernel(stream):
    kernel = FakeKernel()
    x, y = MEMORY[:4], MEMORY[4:8]
    launch(kernel, (3,), x, y, 5, 6, 1e-6, BLOCK=32, num_warps=4)
    assert kernel.by_triton == [((3,), (x, y, 5, 6, 1e-6), {"BLOCK": 32, "num_warps": 4})]
    stream["stream"] = 8
    launch(kernel, (2, 4), y, x, 9, 6, 0.5, BLOCK=32, num_warps=4)
    assert len(kernel.by_triton) == 1
    before = ("kernel 1", False, True, None, None, "metadata", None, None, None)
    assert kernel.direct == [(2, 4, 1, 8, *before, y.data_ptr(), x.data_ptr(), 9, 6, 0.5, None)]


@pytest.mark.parametrize(
    "change",
    [
        {"x": MEMORY[1:5]},
        {"y": MEMORY[1:5]},
        {"x": MEMORY[:4].view(torch.int32)},
        {"fixed": 1},
        {"fixed": 16},
        {"varying": 2**31},
        {"varying": True},
        {"eps": 1},
        {"y": None},
        {"BLOCK": 64},
        {"num_warps": 8},
    ],
    ids=str,
)
def test_what_triton_may_compile_for_is_another_kind(stream, change):
    kernel = FakeKernel()
    usual = {"x": MEMORY[:4], "y": MEMORY[4:8], "varying": 5, "fixed": 6, "eps": 0.5, "BLOCK": 32, "num_warps": 4}
    for values in (usual, usual | change):
        places = [values[name] for name in ("x", "y", "varying", "fixed", "eps")]
        launch(kernel, (1,), *places, BLOCK=values["BLOCK"], num_warps=values["num_warps"])
    assert len(kernel.by_triton) == 2 and not kernel.direct


@dataclass
class TensorDescriptor:
    """As Triton's, of that name."""

    base: torch.Tensor
    block_shape: list[int]


def test_descriptors_are_passed_on_whole_and_told_apart_by_their_boxes(stream):
    kernel = FakeKernel()
    first, second = TensorDescriptor(MEMORY, [16, 64]), TensorDescriptor(MEMORY[4:], [16, 64])
    for descriptor in (first, second):
        launch(kernel, (1,), MEMORY, descriptor, 5, 6, 0.5, BLOCK=32)
    assert len(kernel.by_triton) == 1
    assert kernel.direct[0][-5] is second
    launch(kernel, (1,), MEMORY, TensorDescriptor(MEMORY, [32, 64]), 5, 6, 0.5, BLOCK=32)
    launch(kernel, (1,), MEMORY, TensorDescriptor(MEMORY.view(torch.int32), [16, 64]), 5, 6, 0.5, BLOCK=32)
    assert len(kernel.by_triton) == 3


def test_a_kernel_is_not_used_on_another_device(stream):
    kernel = FakeKernel()
    launcher = Launcher(kernel, BLOCK=32)
    for stream["device"] in (0, 1, 0, 1):
        launcher((1,), MEMORY, MEMORY, 5, 6, 0.5)
    assert len(kernel.by_triton) == len(kernel.direct) == 2


def test_triton_launches_where_its_profiler_listens_or_the_kernel_needs_scratch_memory(stream):
    kernel, needy = FakeKernel(), FakeKernel(scratch=128)
    launcher, needy_launcher = Launcher(kernel, BLOCK=32), Launcher(needy, BLOCK=32)
    module.enter_hooks.append(print)
    for _ in range(3):
        launcher((1,), MEMORY, MEMORY, 5, 6, 0.5)
        needy_launcher((1,), MEMORY, MEMORY, 5, 6, 0.5)
    assert len(kernel.by_triton) == len(needy.by_triton) == 3
    module.enter_hooks.clear()
    launcher((1,), MEMORY, MEMORY, 5, 6, 0.5)
    needy_launcher((1,), MEMORY, MEMORY, 5, 6, 0.5)
    assert len(kernel.direct) == 1 and not needy.direct


def test_an_integer_that_always_differs_does_not_fill_the_memory(stream, monkeypatch):
    monkeypatch.setattr(module, "MAX_KINDS", 3)
    kernel = FakeKernel()
    launcher = Launcher(kernel, BLOCK=32)
    for value in (*range(10), 9):
        launcher((1,), MEMORY, MEMORY, 5, value, 0.5)
    assert len(kernel.by_triton) == 10 and len(kernel.direct) == 1


TENSORS = [MEMORY, MEMORY[1:], MEMORY[4:], MEMORY.view(torch.int32), MEMORY.view(torch.int32)[2:]]
INTEGERS = [-(2**31) - 1, -(2**31), -16, -1, 0, 1, 2, 15, 16, 17, 2**31 - 1, 2**31, 2**31 + 16, 2**63 - 1, 2**63]
ARGUMENTS = st.tuples(
    *(st.sampled_from(TENSORS),) * 2, *(st.sampled_from(INTEGERS),) * 3, st.sampled_from([0.0, 0.5, 16.0])
)
UNSPECIALISED = (2, 3)


@given(first=ARGUMENTS, others=ARGUMENTS, place=st.integers(0, 5))
def test_launches_of_one_kind_are_the_same_to_triton(first, others, place):
    second = (*first[:place], others[place], *first[place + 1 :])

    def specialise(args: tuple[Any, ...]) -> list[Any]:
        return [
            native_specialize_impl(BaseBackend, arg, False, place not in UNSPECIALISED, True)
            for place, arg in enumerate(args)
        ]

    params = [SimpleNamespace(do_not_specialize=i in UNSPECIALISED, is_constexpr=False) for i in range(len(first))]
    layout = lay_out(tuple(map(type, first)), params)
    assert layout is not None
    kinds: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "current_device", lambda: 0)
        write_launch.cache_clear()
        run = write_launch(layout)({}, lambda kind, grid, args: kinds.append(kind))
        for args in (first, second):
            run((1,), *args)
    write_launch.cache_clear()
    if kinds[0] == kinds[1]:
        assert specialise(first) == specialise(second)
