"""Requests that are cheap to send and expensive to serve or to refuse: what they cost the server, and other clients.

    .venv/bin/python bench/attacks.py                                # every part, each on a server of its own
    .venv/bin/python bench/attacks.py --part keys --part bodies      # some of them
    .venv/bin/python bench/attacks.py --part refusals --tree ../other --mebibytes 2  # the server of another checkout

The parts are in attack_parts. Most print each figure beside the limit that it has to meet. The memory that counts is
that of the process that speaks HTTP; the engine's is another one.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from attack_parts import connections, conversations, grammars, keys, refusals
from attack_parts.clients import MODEL, Server


class Part(NamedTuple):
    run: Callable[[Server, argparse.Namespace], None]
    options: tuple[str, ...] = ()  # of the server


PARTS = {
    "refusals": Part(lambda server, args: refusals.run(server, args.only, args.mebibytes)),
    "bodies": Part(lambda server, _: connections.run_bodies(server)),
    "pipelining": Part(lambda server, _: connections.run_pipelining(server)),
    "connections": Part(lambda server, _: connections.run_idle(server)),
    "responses": Part(lambda server, _: conversations.run_responses(server)),
    "references": Part(lambda server, _: conversations.run_references(server)),
    "background": Part(lambda server, _: conversations.run_background(server), conversations.BACKGROUND_OPTIONS),
    "keys": Part(lambda server, args: keys.run(server.address, args.only, args.seconds), keys.OPTIONS),
    "grammars": Part(lambda server, args: grammars.run(server, args.bombs, args.rounds), grammars.OPTIONS),
}


@contextmanager
def serving(tree: Path, *options: str) -> Iterator[Server]:
    """A server of the checkout, with these options."""
    # An earlier checkout (`--tree`) can't be run as a package.
    module = "ratoon" if (tree / "ratoon" / "__main__.py").exists() else "ratoon.api.cli"
    command = [sys.executable, "-m", module, "serve", MODEL, "--port", "0", "--max-model-len", "2048", *options]
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the server did not start")
        yield Server(process.pid, urlsplit(line.split()[0]).netloc)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="checkout whose server is run")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="may be repeated; default: all of them")
    parser.add_argument("--mebibytes", type=float, default=15.9, help="refusals: size of a body; default 15.9")
    parser.add_argument("--only", default="", help="refusals, keys: attacks, or loads, whose name has this in it")
    parser.add_argument("--seconds", type=float, default=20.0, help="keys: of each load; default 20")
    parser.add_argument("--bombs", type=int, default=64, help="grammars: how many at once; default 64")
    parser.add_argument("--rounds", type=int, default=2, help="grammars: how often they are sent; default 2")
    args = parser.parse_args()
    for name in args.part or PARTS:
        print(f"\n## {name}\n")
        with serving(args.tree, *PARTS[name].options) as server:
            PARTS[name].run(server, args)


if __name__ == "__main__":
    main()
