"""Which device and dtype an engine runs with, and one clear sentence where what was asked for can't be had."""

from __future__ import annotations

import ctypes
import os
import re
from importlib.util import find_spec
from typing import Any

import torch

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ConfigError
from ratoon.execution.passes.cuda_driver import DEVICE_VARIABLE
from ratoon.layers.torch_internals import num_modes

OLDEST_FOR_TRITON = (8, 0)  # compute capability; all of these have bfloat16
# Of mallopt(3)
MALLOC_TRIM_THRESHOLD, MALLOC_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 512 << 20
LARGEST_KEPT_BYTES = 32 << 20  # of one piece; glibc allows no more
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = os.environ.get(DEVICE_VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError("device", f"{name!r} is unknown", "auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"{name!r} is not supported", "auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        _verify_cuda(name, device)
    return device


def use_device(device: torch.device) -> None:
    """Make it the current one of this thread: kernels are launched there."""
    if device.type == "cuda" and device.index is not None:  # without an index it is the current one
        torch.cuda.set_device(device)


def keep_freed_memory() -> None:
    """Let the C library keep what a step has freed for the next one, up to KEPT_BYTES, where it is glibc. It would give
    the larger pieces back to the system, and getting them again costs more than what is computed in them."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(MALLOC_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(MALLOC_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)


def has_modes_of_its_own() -> bool:
    """Whether torch behaves in another way on this thread than on a new one: by autocast, a default device, or another
    mode of the program that calls."""
    return num_modes() > 0 or torch.is_autocast_enabled("cuda")


class on_stream:
    """Makes a stream the current one, as torch.cuda.stream does, in half of the time if the stream's device is the
    current one."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        before = torch.cuda.current_stream()
        if before.device_index == self._stream.device_index:
            self._before: Any = before
            torch.cuda.set_stream(self._stream)
        else:
            self._before = torch.cuda.stream(self._stream)
            self._before.__enter__()

    def __exit__(self, *error: object) -> None:
        if isinstance(self._before, torch.cuda.Stream):
            torch.cuda.set_stream(self._before)
        else:
            self._before.__exit__(*error)


def _verify_cuda(name: str, device: torch.device) -> None:
    if not torch.cuda.is_available():
        problem, expected = why_no_cuda()
        raise ConfigError("device", f"{name!r} was asked for, but {problem}", expected)
    last = torch.cuda.device_count() - 1
    if device.index is not None and device.index > last:
        there = "cuda:0" if last == 0 else f"cuda:0 to cuda:{last}"
        raise ConfigError("device", f"there is no {name!r}", f"this machine has {there}")
    known = torch.cuda.get_arch_list()
    if known and not _runs_on(known, torch.cuda.get_device_capability(device)):
        problem = f"this build of torch has no kernels for {gpu_name(device)}, only for {', '.join(known)}"
        raise ConfigError("device", problem, "another build of torch, another GPU, or cpu")
    if find_spec("triton") is None:
        raise ConfigError("device", f"{name!r} needs Triton, which is not installed", "pip install triton, or use cpu")
    if torch.cuda.get_device_capability(device) < OLDEST_FOR_TRITON:
        oldest = ".".join(map(str, OLDEST_FOR_TRITON))
        problem = f"kernels in Triton need compute capability {oldest} or higher, and this is {gpu_name(device)}"
        raise ConfigError("device", problem, "a newer GPU, or cpu")


def why_no_cuda() -> tuple[str, str]:
    """Why torch can't use a GPU, and what would help. torch itself says it only when CUDA is initialised."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA", "install a CUDA build of torch, or use cpu"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        text = str(error)
        if "driver" in text and "too old" in text:
            found = re.search(r"found version (\d+)", text)
            version = f" (it is for CUDA {_cuda_version(int(found[1]))})" if found else ""
            needed = f"a driver for CUDA {torch.version.cuda} or newer, or a build of torch for an older CUDA, or cpu"
            return f"the NVIDIA driver is too old{version} for this torch", needed
        if "no NVIDIA driver" in text:
            return "there is no NVIDIA driver", "install one, or use cpu"
        return f"CUDA does not start: {text.strip().splitlines()[0]}", "use cpu, or mend it"
    return "torch sees no CUDA device", "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use cpu"


def _cuda_version(number: int) -> str:
    """12040 → 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _runs_on(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Machine code (sm_) runs on later minor versions of its generation, intermediate code (compute_) on all later
    ones."""
    own = 10 * capability[0] + capability[1]
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = re.match(r"\d+", number)  # without a suffix, as in sm_90a
        if digits is None:
            continue
        built_for = int(digits[0])
        if built_for <= own and (kind == "compute" or built_for // 10 == own // 10):
            return True
    return False


def gpu_bytes(name: str) -> int:
    """The memory of the GPU that a setting means; 0: it means a CPU, or a device of another package."""
    if name.partition(":")[0] not in ("auto", "cuda") or not torch.cuda.is_available():
        return 0
    device = resolve_device(name)
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def gpu_name(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


def resolve_dtype(name: str, device: torch.device, model: ModelConfig) -> torch.dtype:
    """On a CPU float32 unless another is asked for: few CPUs multiply 16-bit numbers fast."""
    if name != "auto":
        return _DTYPES[name]
    return torch.float32 if device.type == "cpu" else _DTYPES.get(model.checkpoint_dtype, torch.bfloat16)
