"""What `pytest --cpu-times` counts: the time of a process and of all that it started, running or ended."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.cpu_times import tree_seconds

WORK = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"


def test_processes_that_were_started_are_counted_while_they_run_and_once_they_have_ended() -> None:
    before = tree_seconds(os.getpid())
    with subprocess.Popen([sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert tree_seconds(child.pid) > 0.1
        assert tree_seconds(os.getpid()) - before > 0.1
        child.communicate(b"\n")
    assert tree_seconds(child.pid) == 0
    assert tree_seconds(os.getpid()) - before > 0.1
