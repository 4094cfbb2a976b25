"""A CPU whose operations are torch's own: slower than the CPU kernels, and a reference for them."""

from __future__ import annotations

import torch

from ratoon.execution.device_kinds import OpsSettings
from ratoon.layers.ops import Ops
from ratoon.layers.torch_ops import TorchOps


class PlainCpu:
    def open(self, name: str) -> torch.device:
        return torch.device("cpu")

    def make_ops(self, device: torch.device, dtype: torch.dtype, settings: OpsSettings) -> Ops:
        return TorchOps()


PLAIN_CPU = PlainCpu()
