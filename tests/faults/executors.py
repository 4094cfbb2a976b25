"""Executors that misbehave when they meet a marked prompt, or stand still where a test wants to kill their process.
Named in the `executor` setting of engines under test."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ratoon.core.plan import SchedulerOutput
from ratoon.distributed import multiproc
from ratoon.distributed.multiproc import MultiprocExecutor
from ratoon.distributed.uniproc import UniProcExecutor

KILL_TOKEN, RAISE_TOKEN, HANG_TOKEN = 91, 92, 93
NAME = f"{__name__}:MisbehavingExecutor"
HALTING = f"{__name__}:HaltingExecutor"
IMPATIENT = f"{__name__}:ImpatientExecutor"
HALTING_AT_READING = f"{__name__}:HaltingAtReadingExecutor"
HALT_FILE = "RATOON_TEST_HALT_FILE"


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


class Halt:
    """How a test asks for a halt, and learns that it was reached. What is asked for is in a file: it holds for the
    processes that are started until one of them has halted, and that one removes it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def after(self, num_steps: int) -> None:
        """The engine carries out so many further steps, and begins no other."""
        scratch = self.file.with_suffix(".new")
        scratch.write_text(str(num_steps))
        scratch.rename(self.file)

    @property
    def is_reached(self) -> bool:
        return not self.file.exists()


class HaltingExecutor(UniProcExecutor):
    """Its process is killed in the middle of a request, however fast or slow it and its parent are."""

    _num_steps = 0  # since the halt was asked for

    def counts(self, plan: SchedulerOutput) -> bool:
        return True

    def execute_model(self, plan: SchedulerOutput) -> None:
        if self.counts(plan):
            self._halt_if_asked()
        super().execute_model(plan)

    def _halt_if_asked(self) -> None:
        file = Path(os.environ[HALT_FILE])
        with suppress(FileNotFoundError):
            if self._num_steps >= int(file.read_text()):
                file.unlink()
                time.sleep(1000)
            self._num_steps += 1


class HaltingAtReadingExecutor(HaltingExecutor):
    """It counts the steps that read hidden states."""

    def counts(self, plan: SchedulerOutput) -> bool:
        return bool(plan.captures)


class ImpatientExecutor(MultiprocExecutor):
    """Its ranks have seconds for a step, not minutes."""

    def __init__(self, *arguments: Any) -> None:
        multiproc.SECONDS_OF_A_STEP = 6.0
        super().__init__(*arguments)
