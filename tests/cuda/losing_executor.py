"""An executor whose device is lost once: a kernel that fails makes every later call fail."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import triton
import triton.language as tl

from ratoon.core.plan import SchedulerOutput
from ratoon.distributed.uniproc import UniProcExecutor

NAME = f"{__name__}:LosingExecutor"
MARK_VARIABLE = "RATOON_TEST_LOST_ONCE"  # a file that says that it has happened
KIND_VARIABLE = "RATOON_TEST_LOST_BY"
KINDS = ("a failed assertion", "an illegal address")
LOSING_STEP = 6
NO_MEMORY = 1 << 44  # an address where nothing is


class LosingExecutor(UniProcExecutor):
    def execute_model(self, plan: SchedulerOutput) -> None:
        mark = Path(os.environ[MARK_VARIABLE])
        if plan.step == LOSING_STEP and not mark.exists():
            mark.write_text("lost")
            # Either fails on the device, and is not seen here.
            if os.environ[KIND_VARIABLE] == KINDS[0]:
                torch.zeros(4, device="cuda")[torch.tensor([10**9], device="cuda")]
            else:
                write_to[(1,)](torch.tensor([NO_MEMORY], device="cuda"))
        super().execute_model(plan)


@triton.jit
def write_to(address):  # type: ignore[no-untyped-def]
    tl.store(tl.load(address).to(tl.pointer_type(tl.int64)), 1)
