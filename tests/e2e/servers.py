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

from tests.forked_engines import ForkedCommand, command_with_forks
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
TINY_OPTIONS = ("--load-format", "dummy", "--device", "cpu", "--threads", "1", "--num-blocks", "600")
ADMIN_KEY = "key-of-the-administrator"
AS_ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@dataclass
class Server:
    process: subprocess.Popen[str] | ForkedCommand
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
def serving(
    model: str | Path, *options: str, is_forked: bool = True, has_forks: bool = True, **environment: str
) -> Iterator[Server]:
    """A server with a tiny model, ready. It is ended behind the block, if it has not ended by then. `is_forked`: its
    process starts quickly (tests/forked_engines.py), and has torch. `has_forks`: so do its engines, which are not its
    children."""
    path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH", os.environ.get("PYTHONPATH")), str(ROOT)]))
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": path}
    command, inherited = serve_command(model, *options), []
    process: subprocess.Popen[str] | ForkedCommand
    if is_forked:
        process = ForkedCommand(*command[3:], env=variables, has_forks=has_forks)
    else:
        if has_forks:
            command, descriptor = command_with_forks(*command[3:])
            inherited = [descriptor]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=variables, pass_fds=inherited)
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
