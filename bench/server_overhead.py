"""What the way through HTTP costs: the same work through `LLM.generate` in one process and through `ratoon serve`.

    .venv/bin/python bench/server_overhead.py --json overhead.json

Both load the same folder and get the same prompts as token ids; decoding is greedy and does not stop at an end token.
They take turns, another one first in every round. The client of the server runs on the same cores and is part of what
is measured. The aim is a ratio of 0.95 or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from export_hf import DEFAULT_FOLDER, MODEL, export_model
from harness import OURS, Program, count, format_spread, in_turn, ratios_of, say, spread
from peers.protocol import MAX_MODEL_LEN
from service.server import ServerFailedError, ServerProcess
from workloads import Call, PromptSource

SEED = 1
AIM = 0.95
DIRECT, SERVED = "LLM.generate", "ratoon serve"
COUNT = re.compile(rb'"completion_tokens": ?(\d+)')


class ServerOverhead(Program):
    doc = __doc__

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        count(parser, "--requests", 32, "at once")
        count(parser, "--input", 128, "tokens")
        count(parser, "--output", 128, "tokens")
        parser.add_argument("--no-stream", action="store_true", help="ask for whole answers instead of streams")

    def prepare(self) -> None:
        self.folder = export_model(MODEL, DEFAULT_FOLDER)
        self.prompts = PromptSource(SEED)
        self.rates: dict[str, list[float]] = {DIRECT: [], SERVED: []}  # output tokens a second
        self.client_cpu_share: list[float] = []  # of the time that a served round takes

    def measure(self) -> None:
        args = self.args
        # What peers/ratoon_worker.py gives its LLM.
        options = [str(self.folder.resolve()), "--served-model-name", MODEL, "--device", "cpu", "--dtype", "float32"]
        options += ["--threads", str(args.threads), "--max-model-len", str(MAX_MODEL_LEN), "--kv-memory", "2GiB"]
        with ExitStack() as stack:
            self.engine = self.add_engine(stack, OURS, self.folder, log="ratoon-overhead")
            self.engine.start(PromptSource(SEED + 1).prompt(args.input))
            self.server = stack.enter_context(ServerProcess(options))
            ways = {DIRECT: self._direct, SERVED: self._served}
            for index in range(-1, args.rounds):  # the first one warms up
                prompts = [self.prompts.prompt(args.input) for _ in range(args.requests)]
                call = Call(prompts, args.output)
                for name in in_turn(ways, index):
                    say(f"round {index + 1}/{args.rounds}: {name}")
                    rate = call.num_output_tokens / ways[name](call)
                    if index >= 0:
                        self.rates[name].append(rate)

    def _direct(self, call: Call) -> float:
        return self.engine.generate(call.prompts, call.num_tokens).seconds

    def _served(self, call: Call) -> float:
        return asyncio.run(self._exchange(call))

    async def _exchange(self, call: Call) -> float:
        begin, cpu_before = time.perf_counter(), time.process_time()
        answers = await asyncio.gather(*(self._complete(prompt, call.num_tokens) for prompt in call.prompts))
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_before
        self.client_cpu_share.append(cpu_seconds / seconds)
        for answer in answers:
            told = COUNT.findall(answer)
            if not answer.startswith(b"HTTP/1.1 200 ") or not told or int(told[-1]) != call.num_tokens:
                raise ServerFailedError(f"an answer does not have {call.num_tokens} tokens: {answer[-500:]!r}")
        return seconds

    async def _complete(self, prompt: list[int], num_tokens: int) -> bytes:
        """Returns the bytes of an answer, head and framing included: all else would be the client's time."""
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "seed": SEED}
        if not self.args.no_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection(self.server.host, self.server.port)
        writer.write(head.encode() + data)
        answer = await reader.read()
        writer.close()
        return answer

    def title(self) -> str:
        return f"{MODEL} in fp32, {self.args.threads} threads"

    def report(self) -> Iterator[str]:
        args, way = self.args, "whole answers" if self.args.no_stream else "streams"
        lines = [
            f"{args.requests} requests at once, {args.input} tokens in, {args.output} out; {way}; {args.rounds} rounds"
        ]
        lines.append("Output tokens a second, median (min–max)")
        lines += [f"  {name:<14}{format_spread(spread(rates))}" for name, rates in self.rates.items()]
        ratio = ratios_of(self.rates[SERVED], self.rates[DIRECT])
        verdict = "reached" if ratio["median"] >= AIM else "missed"
        lines.append(f"  {'ratio':<14}{format_spread(ratio, '×')}; the aim of {AIM} is {verdict}")
        share = spread(self.client_cpu_share)["median"]
        yield "\n".join([*lines, f"  The client took {share:.1%} of a core while it was served."])

    def figures(self) -> dict[str, Any]:
        ratios = [served / direct for served, direct in zip(self.rates[SERVED], self.rates[DIRECT])]
        return {"tokens_per_second": self.rates, "ratios": ratios, "client_cpu_share": self.client_cpu_share}


if __name__ == "__main__":
    sys.exit(ServerOverhead().run())
