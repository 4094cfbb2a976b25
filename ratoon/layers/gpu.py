"""What kernels are chosen by: facts about the GPU that they run on, asked once."""

from __future__ import annotations

from functools import cache

import torch

_WGMMA_CAPABILITY = (9, 0)  # wgmma is Hopper's alone


@cache
def has_wgmma() -> bool:
    """Whether kernels for Hopper can run: on this GPU, and in Gluon."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != _WGMMA_CAPABILITY:
        return False
    return has_gluon()


def has_gluon() -> bool:
    """Whether kernels in Gluon can run: it is experimental, and differs between versions of Triton."""
    from ratoon.layers.triton.internals import IS_KNOWN  # Triton may be absent where there is no GPU

    return IS_KNOWN


@cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type == "meta" and torch.cuda.is_available():  # kernels are compiled for the current device
        device = torch.device("cuda")
    if device.type != "cuda":  # the interpreter
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
