"""`ratoon ps` and `ratoon stop`: the models of a running server."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from ratoon.api.options import Subparsers, add_common_options
from ratoon.api.remote.options import DEFAULT_URL, open_client
from ratoon.core.sizes import format_size

PS = """List the models of a running server (`ratoon serve`): which are loaded, and the memory that they take."""
STOP = """Unload a model of a running server that has several: its process ends when no request uses it. The next
request for it loads it again. The server itself ends by Ctrl-C or SIGTERM."""


def add_parser(subparsers: Subparsers) -> None:
    ps = subparsers.add_parser("ps", help="list the models of a running server", description=PS)
    ps.add_argument("--json", action="store_true", help="print a JSON object for each")
    ps.set_defaults(run=run_ps)
    stop = subparsers.add_parser("stop", help="unload a model of a running server", description=STOP)
    stop.add_argument("model", metavar="MODEL", help="its name, as `ratoon ps` shows it")
    stop.set_defaults(run=run_stop)
    for parser in (ps, stop):
        parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help=f"the server; default {DEFAULT_URL}")
        parser.add_argument("--api-key", metavar="KEY", help="the server's key")
        add_common_options(parser)


def run_ps(args: argparse.Namespace) -> int:
    async def ask() -> list[dict[str, Any]]:
        async with open_client(args) as client:
            answer = await client.get("/v1/models")
        return list(answer["data"])

    models = asyncio.run(ask())
    if args.json:
        for model in models:
            print(json.dumps(model, ensure_ascii=False))
        return 0
    rows = [("model", "state", "memory", "context")]
    for model in models:
        memory, length = model.get("memory_bytes"), model.get("max_model_len")
        state = model.get("state") or "loaded"
        rows.append((model["id"], state, format_size(memory) if memory else "-", str(length or "-")))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, state, memory, length in rows:
        print(f"{name:<{widths[0]}}  {state:<{widths[1]}}  {memory:>{widths[2]}}  {length:>{widths[3]}}")
    return 0


def run_stop(args: argparse.Namespace) -> int:
    async def ask() -> None:
        async with open_client(args) as client:
            await client.post("/api/generate", {"model": args.model, "keep_alive": 0})

    asyncio.run(ask())
    print(f"{args.model} is unloaded")
    return 0
