"""For all tests: what a test sees must not depend on how the run was started, or on what else the machine has."""

import os
import signal
import threading

CORES_OF_A_WORKER = 2

# A run that was started in the background ignores Ctrl-C, and so would every process it starts.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests mean the CPU unless they name a CUDA device, in the processes that they start too.
os.environ["RATOON_DEVICE"] = "cpu"

# On a machine with many cores every test process would start a thread for each of them.
if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    first = CORES_OF_A_WORKER * int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.sched_setaffinity(0, {cores[(first + i) % len(cores)] for i in range(CORES_OF_A_WORKER)})
