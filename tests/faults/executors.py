"""Executors that misbehave when they meet a marked prompt. Named in the `executor` setting of engines under test."""

from __future__ import annotations

import os
import signal
import time

from ratoon.core.plan import SchedulerOutput
from ratoon.distributed.executor import UniProcExecutor

KILL_TOKEN, RAISE_TOKEN, HANG_TOKEN = 91, 92, 93
NAME = f"{__name__}:MisbehavingExecutor"


class MisbehavingExecutor(UniProcExecutor):
    def execute_model(self, plan: SchedulerOutput) -> None:
        for new in plan.scheduled_new_reqs:
            if KILL_TOKEN in new.token_ids[: new.num_prompt_tokens]:
                os.kill(os.getpid(), signal.SIGKILL)
            if RAISE_TOKEN in new.token_ids[: new.num_prompt_tokens]:
                raise RuntimeError("a marked prompt")
            if HANG_TOKEN in new.token_ids[: new.num_prompt_tokens]:
                time.sleep(1000)
        super().execute_model(plan)
