"""Engines in processes of their own over tiny models, for tests that hurt them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.depths import depth_settings
from tests.golden.engines import model_folder

ROOT = Path(__file__).parents[2]
# Where processes that a test starts find tests and, on a host that keeps packages on this path, everything else.
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
FAMILY = "llama with grouped heads"
SETTINGS: dict[str, Any] = {"device": "cpu", "num_blocks": 256, "num_threads": 1, "max_num_seqs": 64}


def engine_settings(**changes: Any) -> dict[str, Any]:
    """With the depth of a test that runs at several."""
    return SETTINGS | depth_settings() | changes


def model_name() -> str:
    return str(model_folder(FAMILY))


def is_running(pid: int) -> bool:
    """A process that ended and was not yet asked after does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def shared_memory_names() -> set[str]:
    """Returns the names of the whole host. Empty where the system keeps no such names as files."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def workers_of(engine: int | None) -> list[int]:
    """The processes of its ranks, in their order."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            rank, _, parent = path.read_text().strip().partition("@")
            if rank.startswith("rank") and parent == str(engine):
                found[rank] = int(path.parent.name)
    return [found[rank] for rank in sorted(found)]
