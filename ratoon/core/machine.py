"""Facts about the machine that this process runs on."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path

CACHE_VARIABLE = "RATOON_CACHE_ROOT"  # the folder of what is kept between starts, in the place of ~/.cache/ratoon
NO_HOME = "/nonexistent"  # Debian's name of the home of users that have none
# Lines of /proc/cpuinfo that say what a processor is, on x86-64 and on ARM; others change from moment to moment
CPU_FIELDS = (
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features",
)  # fmt: skip


def usable_cores() -> int:
    """Cores that this process may run on, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_folder() -> Path:
    """Where the user's caches of Ratoon are. It need not exist, and may be one that can't be written."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(folder):  # the specification has others ignored
        return Path(folder) / "ratoon"
    home = os.path.expanduser("~")
    return Path(home if os.path.isabs(home) else NO_HOME) / ".cache" / "ratoon"


@functools.cache
def cpu_facts() -> dict[str, str]:
    """What Linux says of the first processor (CPU_FIELDS). Empty elsewhere."""
    facts: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, colon, value = line.partition(":")
                if not colon:  # the end of the first processor
                    break
                if name.strip() in CPU_FIELDS:
                    facts[name.strip()] = value.strip()
    except OSError:
        pass
    return facts


def cpu_flags() -> set[str]:
    """The names of instruction sets that Linux gives."""
    facts = cpu_facts()
    return set(facts.get("flags", facts.get("Features", "")).split())


def processor() -> tuple[str, str]:
    """Returns the processor's name, and a digest of all that is known of its model and instructions."""
    facts = cpu_facts() or {"model name": platform.processor() or platform.machine()}
    part = " ".join(facts[name] for name in ("CPU implementer", "CPU part") if name in facts)
    name = facts.get("model name") or f"{platform.machine()} {part}".strip()
    return name, hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:16]
