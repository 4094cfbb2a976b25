"""All checks of a GPU host in one command, each with a time limit and a log; the last lines of each are shown.

    python3 bench/gpu/run_checks.py                       # the tests: `make gpu-test`
    python3 bench/gpu/run_checks.py --micro               # the programs that time single kernels
    python3 bench/gpu/run_checks.py --tests --micro --logs /tmp/logs --limit-seconds 540

A check that fails or runs out of time does not end the run. The exit status is 1 if any did.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PYTEST = ("-m", "pytest", "-q", "-rs", "-p", "no:schemathesis", "--durations=15")
KERNEL_TESTS = "test_triton_*.py"  # under tests/unit: elsewhere they run under Triton's interpreter
MICRO = ("attention", "sampling", "swap")
SHOWN_LINES = 40
MAX_WORKERS = 16  # processes of tests
GPU_TESTS_SECONDS = 600.0  # of several processes: they take two minutes on 16 cores, with no kernel in Triton's cache


@dataclass(frozen=True)
class Check:
    name: str
    arguments: tuple[str, ...]  # of Python
    seconds: float
    environment: tuple[tuple[str, str], ...] = ()


def gpu_tests(num_workers: int) -> list[Check]:
    """Those that run kernels on the device."""
    kernels = sorted(str(path) for path in (REPOSITORY / "tests" / "unit").rglob(KERNEL_TESTS))
    tests = ("tests/cuda", "tests/golden/test_cuda.py", *kernels)
    seconds = GPU_TESTS_SECONDS if num_workers > 1 else 10 * GPU_TESTS_SECONDS
    return [Check("tests", (*PYTEST, *on_cores(num_workers), *tests), seconds, (("TRITON_INTERPRET", "0"),))]


def whole_suite(num_workers: int) -> list[Check]:
    """All tests, those of the CPU too."""
    return [Check("suite", (*PYTEST, *on_cores(num_workers), "tests"), 1800.0)]


def on_cores(num_workers: int) -> tuple[str, ...]:
    return ("-n", str(num_workers), "--dist", "worksteal") if num_workers > 1 else ()


def default_workers() -> int:
    """Kernels are compiled on the CPU, which takes most of the time. A process also takes half a GiB of the GPU."""
    if importlib.util.find_spec("xdist") is None:
        return 1
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


def micro_checks() -> list[Check]:
    return [Check(name, (f"bench/gpu/{name}.py",), 120.0) for name in MICRO]


def run_check(check: Check, log: Path, limit: float) -> tuple[str, float]:
    """The outcome, and seconds."""
    path = os.pathsep.join(
        [str(REPOSITORY), *(os.path.abspath(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one)]
    )
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **dict(check.environment)}
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *check.arguments],
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = process.wait(min(check.seconds, limit))
            outcome = "passed" if status == 0 else "nothing to run" if status == 5 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            outcome = "ran out of time"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return outcome, time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tests", action="store_true", help="those that need a GPU (the default)")
    parser.add_argument("--suite", action="store_true", help="all tests of the repository")
    parser.add_argument("--micro", action="store_true", help=f"bench/gpu/{{{','.join(MICRO)}}}.py")
    workers_help = f"processes of tests (pytest-xdist; default: one for each core, at most {MAX_WORKERS})"
    parser.add_argument("--workers", type=int, default=default_workers(), metavar="N", help=workers_help)
    parser.add_argument("--only", help="names of checks, separated by commas")
    default_logs = Path(os.environ.get("OUT") or REPOSITORY / ".cache" / "gpu-checks")
    parser.add_argument("--logs", type=Path, default=default_logs, metavar="DIR", help="default: $OUT, or %(default)s")
    parser.add_argument("--limit-seconds", type=float, default=3600.0, metavar="S", help="of the whole run")
    args = parser.parse_args()
    checks = gpu_tests(args.workers) if args.tests or not (args.micro or args.suite) else []
    checks += whole_suite(args.workers) if args.suite else []
    checks += micro_checks() if args.micro else []
    if args.only:
        checks = [check for check in checks if check.name in args.only.split(",")]
    args.logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.limit_seconds
    outcomes = []
    for check in checks:
        log = args.logs / f"{check.name}.log"
        outcome, seconds = run_check(check, log, max(1.0, deadline - time.monotonic()))
        outcomes.append(outcome)
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
        print("\n".join([f"==== {check.name}", *tail]), flush=True)
        print(f"==== {check.name}: {outcome}, {seconds:.0f} s, log in {log}\n", flush=True)
    for check, outcome in zip(checks, outcomes):
        print(f"{check.name}: {outcome}")
    return 0 if all(outcome in ("passed", "nothing to run") for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
