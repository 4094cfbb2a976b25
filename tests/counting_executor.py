"""An executor that counts, in a file for each process, the passes of the model over tokens. Named in the `executor`
setting of engines under test."""

from __future__ import annotations

import os
from pathlib import Path

from ratoon.core.plan import SchedulerOutput
from ratoon.distributed.uniproc import UniProcExecutor

NAME = f"{__name__}:CountingExecutor"
FOLDER = "RATOON_TEST_COUNT_FOLDER"


class CountingExecutor(UniProcExecutor):
    def execute_model(self, plan: SchedulerOutput) -> None:
        if not plan.is_empty:
            with (Path(os.environ[FOLDER]) / str(os.getpid())).open("a") as file:
                file.write(".")
        super().execute_model(plan)


def passes_of(folder: Path, pid: int | None) -> int:
    file = folder / str(pid)
    return file.stat().st_size if file.exists() else 0
