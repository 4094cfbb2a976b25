"""What the messages of a service cost: bytes of plans, requests and outputs, and messages a second of one front end.

    python bench/message_costs.py [--branches 1 32 256] [--seconds 1.0]

Messages are those of the real scheduler, encoded as between processes. A front end's work for a message is to decode it
and to record its tokens in the ledger from which requests are replayed; what follows (text, HTTP) is measured by
`http_stream.py`. The way through sockets is measured with a second process that sends as fast as it can: through a
Unix-domain socket, as on one host, and through TCP with encryption (CURVE), as between hosts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq

from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequest
from ratoon.core.wire import Buffer, Decoder, encode
from ratoon.engine.processes.ledger import Ledger
from ratoon.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT_TOKENS = 1000
STEPS = 64


def size_of(frames: list[Buffer]) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)


@dataclass
class Costs:
    """Measures the messages of a service in which so many branches of an engine decode."""

    branches: int
    request_bytes: float  # of one with 1,000 prompt tokens, to the engine
    new_plan_bytes: float  # to the workers when such a request begins
    plan_bytes: float  # a decode step
    output_bytes: float  # a decode step, to the front end
    handled_per_second: float  # messages of decode steps, by one front end
    unix_per_second: float  # through sockets
    encrypted_per_second: float

    @property
    def bytes_of_a_token(self) -> float:
        return self.output_bytes / self.branches


def make_requests(count: int) -> list[EngineCoreRequest]:
    params = SamplingParams(max_tokens=10 * STEPS, all_stop_token_ids=[1 << 20])
    prompts = [[(7 * i + j) % 50_000 for j in range(PROMPT_TOKENS)] for i in range(count)]
    return [EngineCoreRequest(f"cmpl-{i:08d}-0123abcd", prompt, params) for i, prompt in enumerate(prompts)]


def decode_steps(count: int) -> tuple[int, list[int], list[list[Buffer]]]:
    """Returns the bytes of the plan in which requests begin, of the plans of later steps, and the outputs of these."""
    kv = KVCacheConfig(count * 128, BLOCK_SIZE, (KVCacheGroup(FullAttentionSpec(BLOCK_SIZE, 8, 128, "float16"), (0,)),))
    config = SchedulerConfig(max_num_batched_tokens=1 << 20, max_num_seqs=count)
    scheduler = Scheduler(config, CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False), kv, 4096)
    for request in make_requests(count):
        scheduler.add_request(request)
    plans, outputs = [], []
    for step in range(STEPS + 1):
        plan = scheduler.schedule()
        plans.append(size_of(encode(plan)))
        sampled = [[(31 * step + i) % 50_000] for i in range(len(plan.sampled_req_ids))]
        found = scheduler.update_from_output(plan, ModelRunnerOutput(plan.sampled_req_ids, sampled))
        outputs.append(encode(EngineCoreOutputs(found, scheduler.stats(), time.monotonic())))
    return plans[0], plans[1:], outputs[1:]


def rate_of(work: Callable[[], int], seconds: float) -> float:
    """Returns how often something is done in a second; `work` returns how often it has done it."""
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        done += work()
    return done / (time.perf_counter() - began)


def handling_rate(count: int, messages: list[list[Buffer]], seconds: float) -> float:
    decoder = Decoder(EngineCoreOutputs)
    ledger = Ledger()
    for request in make_requests(count):
        ledger.add(request)
    for entry in ledger.ready_to_go():
        ledger.handed_over(entry, 0)

    def handle() -> int:
        for frames in messages:
            ledger.record(decoder.decode(frames))
        return len(messages)

    return rate_of(handle, seconds)


def send_forever(address: str, frames: list[bytes], keys: tuple[bytes, bytes, bytes] | None) -> None:
    socket = zmq.Context().socket(zmq.PUSH)
    if keys is not None:
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = keys
    socket.connect(address)
    while True:
        socket.send_multipart(frames)


def socket_rate(frames: list[Buffer], encrypted: bool, seconds: float) -> float:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ratoon-bench-"))
        socket = zmq.Context.instance().socket(zmq.PULL)
        stack.callback(socket.close, 0)
        keys = None
        if encrypted:
            public, secret = zmq.curve_keypair()
            socket.curve_server, socket.curve_secretkey = True, secret
            keys = public, *zmq.curve_keypair()
        socket.bind("tcp://127.0.0.1:*" if encrypted else f"ipc://{folder}/socket")
        address = socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        arguments = address, [bytes(frame) for frame in frames], keys
        sender = multiprocessing.get_context("spawn").Process(target=send_forever, args=arguments, daemon=True)
        sender.start()
        stack.callback(sender.join)
        stack.callback(sender.kill)
        socket.recv_multipart()  # it has begun

        def receive() -> int:
            socket.recv_multipart()
            return 1

        return rate_of(receive, seconds)


def measure(count: int, seconds: float) -> Costs:
    first, plans, outputs = decode_steps(count)
    return Costs(
        branches=count,
        request_bytes=size_of(encode(make_requests(1)[0])),
        new_plan_bytes=first / count,
        plan_bytes=sum(plans) / len(plans),
        output_bytes=sum(map(size_of, outputs)) / len(outputs),
        handled_per_second=handling_rate(count, outputs, seconds),
        unix_per_second=socket_rate(outputs[0], False, seconds),
        encrypted_per_second=socket_rate(outputs[0], True, seconds),
    )


def main(arguments: list[str] | None = None) -> list[Costs]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--branches", type=int, nargs="+", default=[1, 32, 256], help="that decode in an engine")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="X", help="for each rate; %(default)s")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures")
    args = parser.parse_args(arguments)
    found = [measure(count, args.seconds) for count in args.branches]
    rows: list[tuple[str, Callable[[Costs], Any]]] = [
        ("bytes of a request of 1,000 tokens", lambda one: f"{one.request_bytes:,.0f}"),
        ("bytes of its part of a plan, once", lambda one: f"{one.new_plan_bytes:,.0f}"),
        ("bytes of a plan, a decode step", lambda one: f"{one.plan_bytes:,.0f}"),
        ("bytes of outputs, a token", lambda one: f"{one.bytes_of_a_token:,.0f}"),
        ("messages a second: decoded, recorded", lambda one: f"{one.handled_per_second:,.0f}"),
        ("  tokens a second", lambda one: f"{one.handled_per_second * one.branches:,.0f}"),
        ("messages a second: Unix-domain socket", lambda one: f"{one.unix_per_second:,.0f}"),
        ("messages a second: TCP, encrypted", lambda one: f"{one.encrypted_per_second:,.0f}"),
    ]
    print(f"{'branches that decode in an engine':<40}" + "".join(f"{one.branches:>12}" for one in found))
    for label, show in rows:
        print(f"{label:<40}" + "".join(f"{show(one):>12}" for one in found))
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in found], indent=2) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
