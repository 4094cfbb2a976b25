"""Which device and dtype are used, and the sentence that a user reads where they can't be: torch is faked."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ratoon.core.errors import ConfigError
from ratoon.execution import devices
from ratoon.execution.devices import resolve_device, resolve_dtype
from ratoon.execution.passes import cuda_driver
from ratoon.execution.passes.cuda_driver import DEVICE_VARIABLE, starting_driver
from ratoon.layers.triton.compiler_process import Launch
from tests.golden.tiny_models import tiny_llama

CUDA = torch.device("cuda")
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: …"
)
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU …"


def fake_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], architectures: list[str] | None = None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures or ["sm_75", "sm_80", "sm_90"])
    monkeypatch.setattr(devices, "find_spec", lambda name: name)  # Triton is installed


def fake_no_gpu(monkeypatch: pytest.MonkeyPatch, error: Exception | None, build: str | None = "13.0") -> None:
    def init() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "init", init)


def test_auto_is_cuda_where_there_is_one_unless_the_environment_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, (9, 0))
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    assert resolve_device("auto").type == "cpu"
    assert resolve_device("cuda").type == "cuda"
    monkeypatch.delenv(DEVICE_VARIABLE)
    assert resolve_device("auto").type == "cuda"
    monkeypatch.setenv(DEVICE_VARIABLE, "tpu")
    with pytest.raises(ConfigError, match="tpu"):
        resolve_device("auto")


@pytest.mark.parametrize(
    ("error", "build", "words"),
    [
        (None, None, "was built without CUDA"),
        (None, "13.0", "torch sees no CUDA device; look at nvidia-smi"),
        (
            RuntimeError(TOO_OLD),
            "13.0",
            r"driver is too old \(it is for CUDA 12.4\) for this torch; a driver for CUDA 13.0",
        ),
        (RuntimeError(NO_DRIVER), "13.0", "there is no NVIDIA driver; install one"),
        (RuntimeError("CUDA unknown error\nmore"), "13.0", "CUDA does not start: CUDA unknown error; use cpu"),
    ],
)
def test_a_gpu_that_can_not_be_used_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, build: str | None, words: str
) -> None:
    fake_no_gpu(monkeypatch, error, build)
    with pytest.raises(ConfigError, match=words) as refusal:
        resolve_device("cuda")
    assert "\n" not in str(refusal.value)
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_device("auto").type == "cpu"


@pytest.mark.parametrize(("count", "there"), [(1, "cuda:0"), (4, "cuda:0 to cuda:3")])
def test_a_number_beyond_the_last_device_is_refused(count: int, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=rf"there is no 'cuda:{count}'; this machine has {there}$"):
        resolve_device(f"cuda:{count}")


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),  # a later minor version
        ((8, 0), ["sm_86"], False),  # an earlier one
        ((7, 0), ["sm_75", "sm_90a"], False),
        ((12, 0), ["sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # compiled when it is loaded
    ],
)
def test_a_gpu_that_this_torch_has_no_kernels_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], architectures: list[str], runs: bool
) -> None:
    fake_gpu(monkeypatch, capability, architectures)
    if runs:
        assert resolve_device("cuda").type == "cuda"
        return
    with pytest.raises(
        ConfigError, match=rf"no kernels for Tesla \(compute capability {capability[0]}\.{capability[1]}\)"
    ):
        resolve_device("cuda")


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'cuda' needs Triton, which is not installed; pip install triton, or use"):
        resolve_device("cuda")


def test_a_gpu_that_is_too_old_for_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, (7, 5))
    words = r"need compute capability 8\.0 or higher, and this is Tesla \(compute capability 7\.5\); a newer GPU"
    with pytest.raises(ConfigError, match=words):
        resolve_device("cuda")


def test_auto_is_the_dtype_of_the_checkpoint_on_a_gpu_and_float32_on_a_cpu() -> None:
    model = dataclasses.replace(tiny_llama().config, checkpoint_dtype="float16")
    assert resolve_dtype("auto", CUDA, model) == torch.float16
    assert resolve_dtype("auto", CUDA, dataclasses.replace(model, checkpoint_dtype="int8")) == torch.bfloat16
    assert resolve_dtype("float32", CUDA, model) == torch.float32
    assert resolve_dtype("auto", torch.device("cpu"), model) == torch.float32
    assert resolve_dtype("bfloat16", torch.device("cpu"), model) == torch.bfloat16


def test_a_thread_with_modes_of_its_own_is_told_from_a_new_one():
    assert not devices.has_modes_of_its_own()
    with torch.device("cpu"):
        assert devices.has_modes_of_its_own()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there may be no CUDA
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert devices.has_modes_of_its_own() == torch.is_autocast_enabled("cuda")
    assert not devices.has_modes_of_its_own()


@pytest.mark.parametrize(
    ("setting", "variable", "calls"),
    [
        ("cuda", None, ["cuInit", "cuDeviceGet 0", "kernel", "cuDevicePrimaryCtxRetain", "Triton"]),
        ("cuda:3", "cpu", ["cuInit", "cuDeviceGet 3", "kernel", "cuDevicePrimaryCtxRetain", "Triton"]),
        ("auto", None, ["cuInit", "cuDeviceGet 0", "kernel", "Triton"]),  # the installed torch may be one for CPUs
        ("auto", "cpu", []),
        ("cpu", None, []),
        ("cuda:x", None, []),
    ],
)
def test_the_driver_is_started_while_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, setting: str, variable: str | None, calls: list[str]
) -> None:
    made: list[str] = []

    class Library:
        def cuInit(self, flags: int) -> int:
            made.append("cuInit")
            return 0

        def cuDeviceGet(self, device: object, number: int) -> int:
            made.append(f"cuDeviceGet {number}")
            return 0

        def cuDeviceGetAttribute(self, value: Any, number: int, device: object) -> int:
            value._obj.value = {cuda_driver.MAJOR: 8, cuda_driver.MINOR: 9}[number]
            return 0

        def cuDevicePrimaryCtxRetain(self, context: object, device: object) -> int:
            made.append("cuDevicePrimaryCtxRetain")
            return 0

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(cuda_driver, "import_triton", lambda: lambda: made.append("Triton"))
    process = SimpleNamespace(send=lambda launch: made.append(launch.function))
    monkeypatch.setattr(cuda_driver, "start_compiler", lambda: process)
    launches = [Launch("module", "kernel", {}, 89), Launch("module", "of another GPU", {}, 90)]
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(DEVICE_VARIABLE, variable)
    with starting_driver(setting, launches):
        pass
    assert made == calls


def test_a_machine_without_a_driver_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-that-is-not-there.so")
    monkeypatch.setattr(cuda_driver, "import_triton", lambda: pytest.fail("Triton was imported"))
    with starting_driver("cuda"):
        pass


# Imports of Triton's modules are slow here, so that two threads that import it would meet.
SLOW_IMPORTS = """
import sys, threading, time
from ratoon.execution.passes import cuda_driver

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            threads.add(threading.current_thread().name)
            time.sleep(0.005)

class Library:
    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, number):
        return 101

threads = set()
sys.meta_path.insert(0, Slow())
cuda_driver.load_library = Library
cuda_driver.start_compiler = lambda: None
with cuda_driver.starting_driver("cuda"):
    from triton.runtime.build import compile_module_from_src  # what torch may do
    import ratoon.layers.cuda_ops
assert threads == {"MainThread"}, threads
"""


@pytest.mark.slow  # a process that imports torch
def test_triton_is_imported_by_one_thread() -> None:
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", SLOW_IMPORTS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
