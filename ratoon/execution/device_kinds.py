"""Kinds of devices: how one is opened, and which operations run on it.

Two are built in. Another package may register more (entry points of the group `ratoon.devices`, by the name that the
setting `device` has before a colon), on devices of torch that a runner can use: of the types cpu and cuda.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from ratoon.core.errors import ConfigError
from ratoon.core.plugins import DEVICES, PluginError, find_plugin, plugin_names
from ratoon.execution.devices import resolve_device
from ratoon.layers.native import library
from ratoon.layers.native_choices import KernelChoices
from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.ops import Ops
from ratoon.layers.torch_ops import TorchOps

logger = logging.getLogger(__name__)

BITS_OF_FLOATS = {"int8": 8, "int4": 4}  # by the setting `quantization`
OLDEST_FOR_DEPENDENT_LAUNCH = (9, 0)  # compute capability
RUNNABLE = ("cpu", "cuda")  # types of torch devices that runners and KV caches are written for


@dataclass(frozen=True, slots=True)
class OpsSettings:
    """Settings that decide which operations are used."""

    batch_invariant: bool = False
    quantization: str = "auto"
    kernels: KernelChoices | None = None  # of products with quantised weights, on a CPU


class DeviceKind(Protocol):
    def open(self, name: str) -> torch.device:
        """The device that the setting means. Raises ConfigError if it can't be used."""
        ...

    def make_ops(self, device: torch.device, dtype: torch.dtype, settings: OpsSettings) -> Ops:
        """The fastest operations for the device and the dtype."""
        ...


class CpuDevice:
    def open(self, name: str) -> torch.device:
        return resolve_device(name)

    def make_ops(self, device: torch.device, dtype: torch.dtype, settings: OpsSettings) -> Ops:
        if reasons := native_ops_reasons(device, dtype):
            if library() is None:
                logger.warning("operations run by torch, which is slower than the CPU kernels: %s", "; ".join(reasons))
            return TorchOps()
        quantization = settings.quantization
        return NativeOps(quantization != "none", BITS_OF_FLOATS.get(quantization), settings.kernels)


class CudaDevice:
    def open(self, name: str) -> torch.device:
        return resolve_device(name)

    def make_ops(self, device: torch.device, dtype: torch.dtype, settings: OpsSettings) -> Ops:
        from ratoon.layers.cuda_ops import CudaOps  # imports triton
        from ratoon.layers.gpu import has_gluon, has_wgmma
        from ratoon.layers.product_choices import choices_file, read_choices

        choices = read_choices(choices_file(device))
        choices.has_wgmma, choices.has_gluon = has_wgmma(), has_gluon()
        logger.info("operations on CUDA run by Triton kernels, products of %s", choices)
        early = torch.cuda.get_device_capability(device) >= OLDEST_FOR_DEPENDENT_LAUNCH
        kept = settings.quantization if settings.quantization == "fp8" else None
        return CudaOps(choices, dependent_launch=early, batch_invariant=settings.batch_invariant, quantization=kept)


BUILT_IN: dict[str, DeviceKind] = {"cpu": CpuDevice(), "cuda": CudaDevice()}


def open_device(name: str) -> tuple[DeviceKind, torch.device]:
    """The kind and the device that a setting means; "auto" is one of the built-in kinds. Raises ConfigError."""
    kind = None if name.partition(":")[0] in (*BUILT_IN, "auto") else _find_registered(name)
    if kind is None:
        device = resolve_device(name)
        return BUILT_IN[device.type], device
    device = kind.open(name)
    if device.type not in RUNNABLE:
        problem = f"{name!r} is a device of torch's type {device.type!r}, for which there is no runner"
        raise ConfigError("device", problem, f"one of the types {' and '.join(RUNNABLE)}")
    return kind, device


def _find_registered(name: str) -> DeviceKind | None:
    needed = tuple(method for method in vars(DeviceKind) if not method.startswith("_"))
    try:
        found: DeviceKind | None = find_plugin(
            DEVICES,
            name.partition(":")[0],
            lambda found: all(callable(getattr(found, method, None)) for method in needed),
            f"object with the methods {', '.join(needed)}",
        )
    except PluginError as error:
        raise ConfigError("device", f"{name!r} {error.problem}", "another version of it") from error
    if found is None and (others := plugin_names(DEVICES)):
        raise ConfigError("device", f"{name!r} is unknown", f"auto, cpu, cuda, cuda:N, {', '.join(others)}")
    return found
