"""For all tests: what a test sees must not depend on how the run was started, or on what else the machine has."""

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.depths import DEPTHS, engines_of_depth

UNIT_TESTS = Path(__file__).parent / "unit"
CORES_OF_A_WORKER = 2

# A run that was started in the background ignores Ctrl-C, and so would every process it starts.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests mean the CPU unless they name a CUDA device, in the processes that they start too.
os.environ["RATOON_DEVICE"] = "cpu"

# What engines keep between starts stays out of the user's folder.
os.environ["RATOON_CACHE_ROOT"] = os.path.join(tempfile.gettempdir(), f"ratoon-tests-{os.getuid()}")

# Test processes run side by side: threads of torch would take the cores from each other, and spin while they wait. This
# holds in the processes that tests start too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU, Triton kernels run under its interpreter, which is chosen when triton is first imported.
if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/proc/driver/nvidia")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# On a machine with many cores every test process would start a thread for each of them.
if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    first = CORES_OF_A_WORKER * int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.sched_setaffinity(0, {cores[(first + i) % len(cores)] for i in range(CORES_OF_A_WORKER)})

# The default repeats the same examples, RATOON_HYPOTHESIS=thorough looks for new ones. Neither has a deadline: how long
# an example takes depends on what else the machine does.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("default", derandomize=True, max_examples=150, database=None, **_COMMON)
settings.register_profile("thorough", max_examples=5000, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("RATOON_HYPOTHESIS", "default"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make check` is a marker: unit tests have it unless they are slow, a few others have it by name."""
    for item in items:
        if item.path.is_relative_to(UNIT_TESTS) and item.get_closest_marker("slow") is None:
            item.add_marker("check")
    worker = getattr(config, "workerinput", None)  # of pytest-xdist
    if worker is not None:
        items[:] = with_long_tests_first(items, worker["workercount"])


def with_long_tests_first(items: list[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """Each process of pytest-xdist (--dist worksteal) begins with an equal part of the list, in order. The parts begin
    with the tests that are marked `long`: one that is begun last would be waited for by all the others."""
    long = [item for item in items if item.get_closest_marker("long") is not None]
    others = [item for item in items if item.get_closest_marker("long") is None]
    ordered: list[pytest.Item] = []
    for num_left in range(num_workers, 0, -1):
        num_items = (len(long) + len(others)) // num_left
        num_long = min(-(-len(long) // num_left), num_items)
        num_others = num_items - num_long
        ordered += long[:num_long] + others[:num_others]
        del long[:num_long], others[:num_others]
    return ordered


@pytest.fixture(params=DEPTHS, ids="{} in flight".format)
def steps_in_flight(request: pytest.FixtureRequest) -> Iterator[int]:
    """For tests that are marked `both_depths` (depths.py)."""
    with engines_of_depth(request.param):
        yield request.param
