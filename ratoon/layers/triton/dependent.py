"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits before it reads what
that one writes. Every program of such a kernel must wait, also one that has nothing to do: the kernels after it rely on
that. Imports no torch, so that kernels that use it can be compiled without.
"""

from __future__ import annotations

from typing import Any

import triton

from ratoon.layers.triton.internals import INTERPRETED, IS_KNOWN

if IS_KNOWN:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CAN_START_EARLY = IS_KNOWN and not INTERPRETED


def launch_options(dependent: bool) -> dict[str, Any]:
    """Keywords of a launch: the kernel's own DEPENDENT, and Triton's."""
    return {"DEPENDENT": True, "launch_pdl": True} if dependent and CAN_START_EARLY else {"DEPENDENT": False}


@triton.jit
def start_kernel_behind():
    """Lets the kernel behind this one start when all programs of this kernel have called this; it waits in turn. The
    earlier, the more of it is done by the time this kernel has ended."""
    gdc_launch_dependents()


@triton.jit
def wait_for_kernel_before():
    """What it wrote is visible after this, and so is what the kernels before that wrote: it waited too."""
    gdc_launch_dependents()
    gdc_wait()
