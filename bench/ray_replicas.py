"""Replicas over Ray against as many processes of this host, which need no Ray: tokens a second.

    .venv/bin/python bench/ray_replicas.py --json ray.json
    .venv/bin/python bench/ray_replicas.py --quick           # tiny sizes: does it work at all?

Needs the extra `ray`. The cluster is one of several nodes in this machine that the program starts, or the one at
RAY_ADDRESS. Only the way of messages differs: TCP with encryption there, Unix-domain sockets here. Both services are up
for the whole run and answer the same requests in turn; ratios are within a round. The aim is at least 0.97.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from export_hf import MODEL
from harness import Program, align, count, format_spread, in_turn, ratios_of, say, spread
from peers.machine import usable_cores
from workloads import PromptSource

from ratoon import AsyncLLM, RequestOutputKind, SamplingParams

RAY, PROCESSES = "over Ray", "processes"
SEED = 1


class RayReplicas(Program):
    doc = __doc__
    threads = False
    quick = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", default=MODEL, help="%(default)s")
        count(parser, "--replicas", 2)
        count(parser, "--requests", 64, "at once")
        count(parser, "--prompt-tokens", 128)
        count(parser, "--answer-tokens", 64)
        parser.add_argument("--kv-memory", default="512MiB", metavar="SIZE", help="of each engine; %(default)s")

    def check_options(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        if args.quick:
            args.requests, args.prompt_tokens, args.answer_tokens = 4, 8, 4

    def measure(self) -> None:
        with ExitStack() as stack:
            if not os.environ.get("RAY_ADDRESS"):
                say("starting a Ray cluster")
                self._start_cluster(stack)
            asyncio.run(self._compare())

    def _start_cluster(self, stack: ExitStack) -> None:
        import ray
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        node = {"num_cpus": self._num_threads, "object_store_memory": 80_000_000}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        stack.callback(cluster.shutdown)
        stack.callback(ray.shutdown)
        for _ in range(self.args.replicas - 1):
            cluster.add_node(**node)
        os.environ["RAY_ADDRESS"] = cluster.address
        stack.callback(os.environ.pop, "RAY_ADDRESS")

    @property
    def _num_threads(self) -> int:
        return max(1, len(usable_cores()) // self.args.replicas)

    async def _compare(self) -> None:
        args = self.args
        common: dict[str, Any] = {"num_replicas": args.replicas, "num_threads": self._num_threads}
        common |= {"kv_memory": args.kv_memory, "skip_tokenizer": True, "enable_prefix_caching": False}
        self.found = {name: [] for name in (PROCESSES, RAY)}
        async with AsyncLLM(args.model, **common) as here, AsyncLLM(args.model, ray=True, **common) as there:
            services = {PROCESSES: here, RAY: there}
            for name in services:
                await self._answer(services[name], 0)
            for round_index in range(args.rounds):
                for name in in_turn(services, round_index):
                    say(f"round {round_index + 1} of {args.rounds}: {name}")
                    self.found[name].append(await self._answer(services[name], round_index))

    async def _answer(self, llm: AsyncLLM, round_index: int) -> float:
        """Tokens a second."""
        args = self.args
        prompts = PromptSource(SEED + round_index)
        params = SamplingParams(
            temperature=0, max_tokens=args.answer_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )

        async def answer(token_ids: list[int]) -> int:
            num_tokens = 0
            async for output in llm.generate({"prompt_token_ids": token_ids}, params):
                assert output.error is None, output.error
                num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
            return num_tokens

        asked = [prompts.prompt(args.prompt_tokens) for _ in range(args.requests)]
        begin = time.monotonic()
        answered = await asyncio.gather(*map(answer, asked))
        seconds = time.monotonic() - begin
        assert sum(answered) == args.requests * args.answer_tokens
        return sum(answered) / seconds

    def title(self) -> str:
        args = self.args
        return (
            f"{args.model}; {args.replicas} replicas of {self._num_threads} threads, {args.requests} requests at once"
        )

    def report(self) -> Iterator[str]:
        rows = [["", "tokens/s"], *([name, format_spread(spread(rates))] for name, rates in self.found.items())]
        yield align(rows)
        ratio = ratios_of(self.found[RAY], self.found[PROCESSES])
        yield f"over Ray ÷ processes: {format_spread(ratio, '×')}; the aim is ≥ 0.97×"

    def figures(self) -> dict[str, Any]:
        return {"tokens_per_second": self.found, "ratio": ratios_of(self.found[RAY], self.found[PROCESSES])}


if __name__ == "__main__":
    sys.exit(RayReplicas().run())
