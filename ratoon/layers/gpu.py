"""What kernels are chosen by: facts about the GPU that they run on, asked once."""

from __future__ import annotations

from functools import cache

import torch

_WGMMA_CAPABILITY = (9, 0)  # wgmma is Hopper's alone
_TRITON = "3.6."


@cache
def has_wgmma() -> bool:
    """Whether kernels for Hopper can run: on this GPU, and with a Triton whose Gluon, which is experimental, is known
    here."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != _WGMMA_CAPABILITY:
        return False
    import triton  # may be absent where there is no GPU

    return triton.__version__.startswith(_TRITON)


@cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type == "meta" and torch.cuda.is_available():  # kernels are compiled for the current device
        device = torch.device("cuda")
    if device.type != "cuda":  # the interpreter
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
