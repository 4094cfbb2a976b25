"""For all tests: what a test sees must not depend on how the run was started, or on what else the machine has."""

import gc
import logging
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import pytest

from tests import seeds
from tests.cpu_times import CpuTimes
from tests.depths import DEPTH_FIXTURE, DEPTHS, engines_of_depth

UNIT_TESTS = Path(__file__).parent / "unit"
CORES_OF_A_WORKER = 2

# A run that was started in the background ignores Ctrl-C, and so would every process it starts.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests mean the CPU unless they name a CUDA device, in the processes that they start too.
os.environ["RATOON_DEVICE"] = "cpu"

# What engines keep between starts stays out of the user's folder.
os.environ["RATOON_CACHE_ROOT"] = os.path.join(tempfile.gettempdir(), f"ratoon-tests-{os.getuid()}")

# Tests start hundreds of processes: without bytecode each of them would compile all modules that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

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

# Seconds after which a test fails, where pytest-timeout is there: many times what the longest takes.
os.environ.setdefault("PYTEST_TIMEOUT", "1200")

seeds.settle()


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A command that a test runs in this process sets up the package's log; later tests read it elsewhere."""
    logger = logging.getLogger("ratoon")
    saved = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.level, logger.handlers, logger.propagate = saved


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times", type=int, metavar="N", help="print the N test files and tests that took the processor longest"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.cpu_times is not None:
        config.pluginmanager.register(CpuTimes(config.option.cpu_times))
    if seeds.asked() is not None:
        config.option.hypothesis_seed = str(seeds.asked())  # as --hypothesis-seed sets it


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    """A fixture that tests share draws the same numbers, whichever of these tests comes first."""
    test = request.node.nodeid if fixturedef.scope == "function" else ""
    seeds.seed_generators(f"{fixturedef.baseid}::{fixturedef.argname} {test}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    seeds.seed_generators(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Objects that are made of thousands of tests live until the end: the garbage collector need not look through
    them, neither while they grow nor in collections that tests ask for."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    """Kernels that tests launch run under a quicker interpreter, where files that were collected need Triton."""
    let_loggers_of_torch_propagate()
    if "triton" in sys.modules:
        from tests.triton_interpreter import repair_interpreter

        repair_interpreter()


def let_loggers_of_torch_propagate() -> None:
    """pytest puts handlers on each logger that does not propagate, six times a test, and torch has forty of these.
    What they log goes to the logger of torch, which has the same handler."""
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger) and not logger.propagate:
            logger.handlers.clear()
            logger.propagate = True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    failed = [report.nodeid for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
    for line in seeds.how_to_repeat(failed):
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make check` is a marker: unit tests have it unless they are slow, a few others have it by name. `make test` is
    all that is not `full`, `make test-rest` all that is. `make test-fresh` is all that is `drawn`."""
    leave_cases_to_the_full_run(items)
    leave_depths_to_the_full_run(items)
    for item in items:
        if item.path.is_relative_to(UNIT_TESTS) and not any(map(item.get_closest_marker, ("slow", "full"))):
            item.add_marker("check")
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("drawn")
    if (part := part_of_rest()) is not None:
        keep_only(items, config, lambda item: is_full(item) and crc32(item.nodeid.encode()) % part[1] == part[0])
    elif not runs_in_full(config):
        keep_only(items, config, lambda item: not is_full(item))
    worker = getattr(config, "workerinput", None)  # of pytest-xdist
    if worker is not None:
        items[:] = with_long_tests_first(items, worker["workercount"])


def leave_cases_to_the_full_run(items: list[pytest.Item]) -> None:
    """Leaves most cases of a test that has the marker one_in(n) to the full run: the first of every n cases stays, and
    the others become `full`, but for those of `make check`. With an n that has no factor in common with the number of a
    parameter's values, each value stays in some case, if as many cases stay as there are values."""
    num_cases: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("one_in")
        if marker is None:
            continue
        test = item.nodeid.partition("[")[0]
        if num_cases[test] % marker.args[0] and item.get_closest_marker("check") is None:
            item.add_marker("full")
        num_cases[test] += 1


def leave_depths_to_the_full_run(items: list[pytest.Item]) -> None:
    """Leaves each case of a test at both depths (depths.py) to the full run at one of them. The depths take turns: some
    tests stay at one and some at the other, and so do the values of a test's parameters."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is None or DEPTH_FIXTURE not in callspec.params:
            continue
        if any(map(item.get_closest_marker, ("one_in", "check", "full"))):
            continue
        others = sum(index for name, index in callspec.indices.items() if name != DEPTH_FIXTURE)
        turn = crc32(item.nodeid.partition("[")[0].encode()) + others
        if callspec.params[DEPTH_FIXTURE] != DEPTHS[turn % len(DEPTHS)]:
            item.add_marker("full")


def keep_only(items: list[pytest.Item], config: pytest.Config, runs: Callable[[pytest.Item], bool]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = filter(runs, items)


def is_full(item: pytest.Item) -> bool:
    return item.get_closest_marker("full") is not None


def part_of_rest() -> tuple[int, int] | None:
    """`make test-rest` runs what `make test` leaves to `make test-all`, or a part of it: which one, of how many."""
    kind, _, part = os.environ.get("RATOON_TESTS", "").partition(" ")
    if kind != "rest":
        return None
    which, num_parts = map(int, part.split("/"))
    return which % num_parts, num_parts


def runs_in_full(config: pytest.Config) -> bool:
    """On request (`make test-all`), and where the command names the marker or a single test."""
    named = "full" in config.option.markexpr or any("::" in argument for argument in config.args)
    return named or os.environ.get("RATOON_TESTS") == "all"


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
