"""An executor that dies of a marked sequence whose hidden states it should read."""

from __future__ import annotations

import os
import signal

from ratoon.core.plan import SchedulerOutput
from ratoon.distributed.uniproc import UniProcExecutor
from tests.faults.executors import KILL_TOKEN

DEADLY = f"{__name__}:DeadlyReadingExecutor"


class DeadlyReadingExecutor(UniProcExecutor):
    def execute_model(self, plan: SchedulerOutput) -> None:
        if any(KILL_TOKEN in capture.token_ids for capture in plan.captures):
            os.kill(os.getpid(), signal.SIGKILL)
        super().execute_model(plan)
