"""The private directory for the sockets of one client's engines, and its removal when the client is killed.

The client holds a lock on a file in it for as long as it lives; the system gives that up with the process. So a
directory whose lock is free is abandoned: an engine that has lost its client removes it, and so does the next client
that starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from ratoon.core.errors import ConfigError
from ratoon.observe.logging import get_logger

logger = get_logger(__name__)

PREFIX = "ratoon-engine-"
LOCK = "lock"
NEW_LOCK = "lock.new"  # until it is locked
LONGEST_SOCKET_PATH = 100  # a Unix-domain address holds 104 to 108 bytes
TIMES_TO_REMOVE = 10
SECONDS_TO_MAKE = 600.0  # an empty directory of this age is not just being created


class SocketDirectory:
    """A private directory (mode 0700) for the sockets of one client's engines."""

    def __init__(self) -> None:
        parent = _find_parent()
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # mkdtemp's mode is 0700
        self._lock = _make_lock(self.path)

    def address(self, name: str) -> str:
        return f"ipc://{self.path / name}"

    def remove(self) -> None:
        for _ in range(TIMES_TO_REMOVE):  # an engine that was stopped may make its socket meanwhile
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                break
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned(parent: Path) -> None:
    """Remove the directories of killed clients of this user. Those of other users, and of running clients, are kept."""
    try:
        found = [Path(entry.path) for entry in os.scandir(parent) if entry.name.startswith(PREFIX)]
    except OSError:
        return
    for path in found:
        remove_if_abandoned(path)


def remove_if_abandoned(path: Path) -> None:
    """Remove the directory if it is ours and its client is gone."""
    try:
        if not _is_private(path):
            return
        lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        _remove_if_unmade(path)  # its client was killed before it had made the lock
        return
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is held: the client lives
        return
    else:
        logger.debug("%s is abandoned and removed", path)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def _find_parent() -> Path:
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if parent and len(parent) + 40 < LONGEST_SOCKET_PATH and os.access(parent, os.W_OK):
            return Path(parent)
    raise ConfigError("TMPDIR", "no short directory to write sockets to", f"under {LONGEST_SOCKET_PATH} characters")


def _make_lock(path: Path) -> int | None:
    """A descriptor that holds the lock; None on a file system that has no locks. The file gets its name when it is
    locked: another client never sees one that is not."""
    made = path / NEW_LOCK
    lock = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        made.unlink()
        return None
    made.rename(path / LOCK)
    return lock


def _is_private(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700


def _remove_if_unmade(path: Path) -> None:
    with contextlib.suppress(OSError):
        if time.time() - path.lstat().st_mtime > SECONDS_TO_MAKE:
            if [entry.name for entry in os.scandir(path)] == [NEW_LOCK]:  # killed before it had its name
                (path / NEW_LOCK).unlink()
            path.rmdir()  # fails, and rightly so, if there is anything else in it
