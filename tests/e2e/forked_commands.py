"""`ratoon` as a program for tests that run many commands: each is forked from a process in which torch is loaded, which
saves the two seconds that a start spends on the import. What runs in it is the same.

    python -m tests.e2e.forked_commands SOCKET

is that process. The program asks it for a command, and hands over its arguments, folder, environment and files.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRELOADED = ["torch", "ratoon.cli", "ratoon.api.llm", "ratoon.execution.worker", "ratoon.models.source", "rich.table"]
PROGRAM = """\
#!{python} -IS
import json, os, socket, sys
asked = socket.socket(socket.AF_UNIX)
asked.connect({path!r})
socket.send_fds(asked, [b"."], [0, 1, 2])
asked.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
asked.shutdown(socket.SHUT_WR)
sys.exit(int(asked.recv(16) or 70))
"""


@contextmanager
def forked_commands(program: Path) -> Iterator[None]:
    """Writes the program `ratoon`, which works until the end of the block."""
    path = program.with_name("ratoon.socket")
    process = subprocess.Popen([sys.executable, "-m", __name__, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        program.write_text(PROGRAM.format(python=sys.executable, path=str(path)))
        program.chmod(0o755)
        yield
    finally:
        process.terminate()
        process.communicate()


def serve(path: str) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children need no wait
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    print("ready", flush=True)
    while True:
        asked, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            run(asked)
        asked.close()


def run(asked: socket.socket) -> None:
    """In the child: a command, with everything as the program that asks for it has it."""
    from ratoon.cli import main

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(asked, 1, 3)
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    with asked.makefile("rb") as message:
        arguments, folder, environment = json.load(message)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["ratoon", *arguments]
    code: object = 70  # of a command that ends in an exception
    try:
        code = main(arguments)
    except SystemExit as end:
        code = 0 if end.code is None else end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        asked.sendall(str(code).encode())
        os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
