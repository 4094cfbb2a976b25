"""The processes that tests fork in the place of those that would be started: a death is noticed whenever it comes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from multiprocessing import resource_sharer

from tests.forked_engines import ForkedProcess, forked_engines
from tests.waiting import PATIENCE

NUM_KILLS = 8


def test_a_child_that_is_killed_before_it_runs_leaves_no_end_of_its_pipes_open():
    with forked_engines():
        for _ in range(NUM_KILLS):
            death, kept_open = os.pipe()
            process = ForkedProcess(
                ["python", "-P", "-m", "ratoon.engine.processes.core_process", str(kept_open)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[kept_open], env=dict(os.environ),
            )  # fmt: skip
            os.close(kept_open)
            assert not resource_sharer._resource_sharer._cache, "a copy waits in this process for the child to ask"
            os.kill(process.pid, signal.SIGKILL)
            ready, _, _ = select.select([death], [], [], PATIENCE)
            assert ready and os.read(death, 1) == b"", "its death can't be seen"
            assert process.wait(PATIENCE) == -signal.SIGKILL
            os.close(death)
            process.stdin.close()
