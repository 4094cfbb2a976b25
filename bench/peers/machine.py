"""What the machine is, and whether something else is using it. Figures of processes come from /proc, so from Linux."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

PROC = Path("/proc")
QUIET_SHARE = 0.06  # of all cores: below this, what others do does not show in the figures
QUIET_SECONDS = 3  # in a row


def usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def describe_machine() -> dict[str, str | int]:
    return {
        "cpu": cpu_name(),
        "cores": len(usable_cores()),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    if shutil.which("lscpu"):  # /proc/cpuinfo has no name on ARM
        output = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
        for line in output.splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "Model name":
                return value.strip()
    return platform.processor() or platform.machine()


def busy_seconds() -> float | None:
    """CPU time that all cores together have spent working since the machine started; None where it is not known."""
    try:
        fields = (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def processes_of(root: int) -> dict[int, float]:
    """The processes of a session and all their descendants: CPU seconds by process id. `root` leads the session."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    found: set[int] = set()
    for path in PROC.glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()  # from field 3 (state) on: see proc(5)
        except OSError:
            continue  # ended meanwhile
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        if pid == root or int(fields[3]) == root:
            found.add(pid)
    while True:
        children = {pid for pid, parent in parents.items() if parent in found} - found
        if not children:
            return {pid: seconds[pid] for pid in found}
        found |= children


def wait_for_quiet_machine(limit_seconds: float) -> bool:
    """True once the machine has been idle for a few seconds; False if it does not get there within the limit."""
    deadline = time.monotonic() + limit_seconds
    quiet = 0
    while quiet < QUIET_SECONDS:
        if time.monotonic() > deadline:
            return False
        quiet = quiet + 1 if _busy_share(1.0) < QUIET_SHARE else 0
    return True


def _busy_share(seconds: float) -> float:
    """How much of all cores was used over the next moments. Without /proc, the load average has to do."""
    before, begin = busy_seconds(), time.monotonic()
    time.sleep(seconds)
    after, end = busy_seconds(), time.monotonic()
    if before is None or after is None:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    return (after - before) / ((end - begin) * (os.cpu_count() or 1))
