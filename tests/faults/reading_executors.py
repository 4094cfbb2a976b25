"""Executors that take their time over hidden states, or die of a marked sequence whose states they should read."""

from __future__ import annotations

import os
import signal
import time

from ratoon.core.plan import SchedulerOutput
from ratoon.distributed.executor import UniProcExecutor
from tests.faults.executors import KILL_TOKEN

SLOW = f"{__name__}:SlowReadingExecutor"
DEADLY = f"{__name__}:DeadlyReadingExecutor"


class SlowReadingExecutor(UniProcExecutor):
    def execute_model(self, plan: SchedulerOutput) -> None:
        if plan.captures:
            time.sleep(0.05)
        super().execute_model(plan)


class DeadlyReadingExecutor(UniProcExecutor):
    def execute_model(self, plan: SchedulerOutput) -> None:
        if any(KILL_TOKEN in capture.token_ids for capture in plan.captures):
            os.kill(os.getpid(), signal.SIGKILL)
        super().execute_model(plan)
