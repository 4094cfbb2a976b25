"""`ratoon serve` as a process of its own, for tests that talk to it over HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import PATIENCE

TINY_OPTIONS = ("--load-format", "dummy", "--device", "cpu", "--threads", "1", "--num-blocks", "600")
ADMIN_KEY = "key-of-the-administrator"
AS_ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    @property
    def api(self) -> str:
        """What OpenAI's clients call the base URL."""
        return f"{self.url}/v1"

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)


def serve_command(model: str | Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "ratoon", "serve", str(model), "--port", "0", *TINY_OPTIONS, *options]


@contextmanager
def serving(model: str | Path, *options: str, **environment: str) -> Iterator[Server]:
    """A server with a tiny model, ready. It is ended behind the block, if it has not ended by then."""
    process = subprocess.Popen(
        serve_command(model, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            _, errors = process.communicate(timeout=PATIENCE)
            raise AssertionError(f"the server did not start: {errors}")
        yield Server(process, line.split()[0])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate()
