"""An executor whose device is lost once: a kernel that reads outside its tensor makes every later call fail."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ratoon.core.plan import SchedulerOutput
from ratoon.distributed.executor import UniProcExecutor

NAME = f"{__name__}:LosingExecutor"
MARK_VARIABLE = "RATOON_TEST_LOST_ONCE"  # a file that says that it has happened
LOSING_STEP = 6


class LosingExecutor(UniProcExecutor):
    def execute_model(self, plan: SchedulerOutput) -> None:
        mark = Path(os.environ[MARK_VARIABLE])
        if plan.step == LOSING_STEP and not mark.exists():
            mark.write_text("lost")
            numbers = torch.zeros(4, device="cuda")
            numbers[torch.tensor([10**9], device="cuda")]  # fails on the device, and is not seen here
        super().execute_model(plan)
