"""What it costs to watch: the throughput of `ratoon serve` with a stream of engine events open, and without.

    .venv/bin/python bench/console_stream.py --json console_stream.json
    PYTHONPATH=. python3 bench/console_stream.py --device cuda --dtype bfloat16 --model bench/gpu/models/qwen3-0.6b

One server answers the same requests in both ways, which take turns, another one first in every round. The stream is
/v1/engine/events, as often as it may be (ten times a second); its reader runs beside the client of the requests, on the
same cores. The aim is a ratio of 0.99 or more.

A folder with the config of a shape and no weights gets random ones, and a tokenizer of words: this needs no network.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from export_hf import DEFAULT_FOLDER, MODEL, export_model
from gpu.compare_parts.models import prepare_model
from harness import count, format_spread, in_turn, ratios_of, say, spread
from peers.protocol import MAX_MODEL_LEN
from server_overhead import SEED, ServerOverhead
from service.server import ServerFailedError, ServerProcess
from workloads import VOCAB_SIZE, Call, PromptSource

AIM = 0.99
ALONE, WATCHED = "alone", "watched"


class ConsoleStream(ServerOverhead):
    doc = __doc__

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        count(parser, "--streams", 1, "of events, at once")
        parser.add_argument("--interval", type=float, default=0.1, help="seconds between events; default 0.1")
        parser.add_argument("--model", default=MODEL, help="a folder, or that of a shape; default: %(default)s")
        parser.add_argument("--device", default="cpu", help="default: %(default)s")
        parser.add_argument("--dtype", default="float32", help="default: %(default)s")

    def prepare(self) -> None:
        folder = export_model(MODEL, DEFAULT_FOLDER) if self.args.model == MODEL else Path(self.args.model)
        self.folder = folder.resolve()
        vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        self.prompts = PromptSource(SEED, min(VOCAB_SIZE, vocab_size))
        self.rates: dict[str, list[float]] = {ALONE: [], WATCHED: []}  # output tokens a second
        self.client_cpu_share: list[float] = []
        self.num_events = self.num_bytes = 0
        self.watched_seconds = 0.0

    def measure(self) -> None:
        args = self.args
        options = ["--served-model-name", MODEL, "--device", args.device, "--dtype", args.dtype]
        options += ["--threads", str(args.threads), "--max-model-len", str(MAX_MODEL_LEN), "--kv-memory", "2GiB"]
        with ExitStack() as stack:
            folder = self.folder
            if not any(folder.glob("*.safetensors")):
                folder = prepare_model(folder, Path(stack.enter_context(tempfile.TemporaryDirectory())))
                options += ["--load-format", "dummy"]
            self.server = stack.enter_context(ServerProcess([str(folder), *options]))
            ways = {ALONE: self._served, WATCHED: self._watched}
            for index in range(-1, args.rounds):  # the first one warms up
                call = Call([self.prompts.prompt(args.input) for _ in range(args.requests)], args.output)
                for name in in_turn(ways, index):
                    say(f"round {index + 1}/{args.rounds}: {name}")
                    rate = call.num_output_tokens / ways[name](call)
                    if index >= 0:
                        self.rates[name].append(rate)

    def _watched(self, call: Call) -> float:
        return asyncio.run(self._exchange_watched(call))

    async def _exchange_watched(self, call: Call) -> float:
        began = asyncio.Event()
        watching = [asyncio.create_task(self._read_events(began)) for _ in range(self.args.streams)]
        try:
            async with asyncio.timeout(60):
                await began.wait()
            seconds = await self._exchange(call)
        finally:
            for task in watching:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*watching)
        self.watched_seconds += seconds
        return seconds

    async def _read_events(self, began: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection(self.server.host, self.server.port)
        path = f"/v1/engine/events?interval={self.args.interval}"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        try:
            while piece := await reader.read(2**16):
                if not began.is_set() and not piece.startswith(b"HTTP/1.1 200 "):
                    raise ServerFailedError(f"there are no events: {piece[:500]!r}")
                began.set()
                self.num_events += piece.count(b"event: ")
                self.num_bytes += len(piece)
        finally:
            writer.close()

    def title(self) -> str:
        args = self.args
        return f"{self.folder.name}, {args.device}, {args.dtype}, {args.threads} threads"

    def report(self) -> Iterator[str]:
        args = self.args
        lines = [f"{args.requests} requests at once, {args.input} tokens in, {args.output} out; {args.rounds} rounds"]
        lines.append("Output tokens a second, median (min–max)")
        lines += [f"  {name:<14}{format_spread(spread(rates))}" for name, rates in self.rates.items()]
        ratio = ratios_of(self.rates[WATCHED], self.rates[ALONE])
        verdict = "reached" if ratio["median"] >= AIM else "missed"
        lines.append(f"  {'ratio':<14}{format_spread(ratio, '×')}; the aim of {AIM} is {verdict}")
        events, kib = self.num_events / self.watched_seconds, self.num_bytes / self.watched_seconds / 1024
        yield "\n".join([*lines, f"  {args.streams} stream(s): {events:.1f} events and {kib:.0f} KiB a second."])

    def figures(self) -> dict[str, Any]:
        ratios = [watched / alone for watched, alone in zip(self.rates[WATCHED], self.rates[ALONE])]
        return {"tokens_per_second": self.rates, "ratios": ratios, "num_events": self.num_events}


if __name__ == "__main__":
    sys.exit(ConsoleStream().run())
