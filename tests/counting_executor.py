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


NOTING = f"{__name__}:NotingExecutor"


class NotingExecutor(UniProcExecutor):
    """Notes how many requests begin in each step in which one begins."""

    def execute_model(self, plan: SchedulerOutput) -> None:
        if plan.scheduled_new_reqs:
            with (Path(os.environ[FOLDER]) / f"{os.getpid()}.begun").open("a") as file:
                file.write(f"{len(plan.scheduled_new_reqs)} ")
        super().execute_model(plan)


def begun_in(folder: Path) -> list[list[int]]:
    """Returns for each process how many requests began in each step, and forgets these numbers."""
    files = list(folder.glob("*.begun"))
    found = [[int(number) for number in file.read_text().split()] for file in files]
    for file in files:
        file.unlink()
    return sorted(found)
