"""A process that watches a server: its memory, and how long `/health` takes, until its standard input is closed.

    python server_watch.py PID HOST:PORT

The result is one line of JSON, with the fields of clients.Watched.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time
from pathlib import Path

MEMORY_SECONDS = 0.02  # between two looks
HEALTH_SECONDS = 0.02  # between an answer and the next question
PATIENCE_SECONDS = 120.0


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Watch:
    def __init__(self, pid: int, address: str) -> None:
        self._pid, self._address = pid, address
        self._ended = threading.Event()
        self._before = resident_bytes(pid)
        self._memory: list[tuple[float, int]] = [(time.monotonic(), self._before)]
        self._longest_health = 0.0

    def run(self) -> dict[str, float]:
        threads = [threading.Thread(target=work) for work in (self._look, self._ask)]
        for thread in threads:
            thread.start()
        print("watching", flush=True)
        sys.stdin.read()
        self._ended.set()
        for thread in threads:
            thread.join()
        sizes = [size - self._before for _, size in self._memory]
        return {
            "peak": max(sizes),
            "left": sizes[-1],
            "growth": self._growth(),
            "longest_health": self._longest_health,
        }

    def _growth(self) -> float:
        """In the later half, in bytes a second."""
        later = self._memory[len(self._memory) // 2 :]
        (begin, first), (end, last) = later[0], later[-1]
        return (last - first) / max(end - begin, MEMORY_SECONDS)

    def _look(self) -> None:
        while not self._ended.wait(MEMORY_SECONDS):
            self._memory.append((time.monotonic(), resident_bytes(self._pid)))

    def _ask(self) -> None:
        """On a new connection each time, as a probe of a cluster does."""
        while not self._ended.wait(HEALTH_SECONDS):
            start = time.monotonic()
            connection = http.client.HTTPConnection(self._address, timeout=PATIENCE_SECONDS)
            try:
                connection.request("GET", "/health")
                answer = connection.getresponse()
                answer.read()
                seconds = time.monotonic() - start if answer.status == 200 else PATIENCE_SECONDS
            except (OSError, http.client.HTTPException):
                seconds = PATIENCE_SECONDS  # no answer counts as the longest wait
            finally:
                connection.close()
            self._longest_health = max(self._longest_health, seconds)


if __name__ == "__main__":
    print(json.dumps(Watch(int(sys.argv[1]), sys.argv[2]).run()), flush=True)
