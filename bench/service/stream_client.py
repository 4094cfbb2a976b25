"""A process that holds streams open: a job as JSON on standard input, the answers as JSON on standard output.

Apart from the driver, so that its processor time can be told from the server's and more than one can be used.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from service.server import BENCH_FOLDER, allow_many_files
from service.streams import Answer, Exchange, StreamFailedError, completion_body, read_answer, run_exchanges


@dataclass(frozen=True)
class StreamJob:
    """One stream. The seed tells the stub executor which tokens to answer with."""

    model: str  # as the server calls it
    prompt: list[int]
    num_tokens: int
    seed: int
    pause_seconds: float = 0.0


@dataclass(frozen=True)
class ClientResult:
    answers: list[Answer]
    cpu_seconds: float  # while the streams ran


def run_clients(host: str, port: int, jobs: list[StreamJob], num_processes: int) -> ClientResult:
    """All streams at once, shared out among client processes; the answers in the order of the jobs."""
    processes = []
    for index in range(num_processes):
        process = subprocess.Popen(
            [sys.executable, "-m", "service.stream_client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=BENCH_FOLDER,
            text=True,
        )
        shares = [asdict(job) for job in jobs[index::num_processes]]
        assert process.stdin is not None
        process.stdin.write(json.dumps({"host": host, "port": port, "jobs": shares}))
        process.stdin.close()
        processes.append(process)
    answers: dict[int, Answer] = {}
    cpu_seconds = 0.0
    for index, process in enumerate(processes):
        assert process.stdout is not None
        result = json.loads(process.stdout.read() or "{}")
        process.wait()
        if "answers" not in result:
            raise StreamFailedError(result.get("error", "a client process ended without a result"))
        cpu_seconds += result["cpu_seconds"]
        for place, answer in enumerate(result["answers"]):
            answers[index + place * num_processes] = Answer(**answer)
    return ClientResult([answers[index] for index in range(len(jobs))], cpu_seconds)


async def serve_job(job: dict[str, Any]) -> tuple[list[Exchange], float]:
    exchanges = [
        Exchange(
            completion_body(one["model"], one["prompt"], one["num_tokens"], one["seed"]),
            pause_seconds=one["pause_seconds"],
        )
        for one in job["jobs"]
    ]
    before = os.times()
    await run_exchanges(job["host"], job["port"], exchanges)
    after = os.times()
    return exchanges, after.user + after.system - before.user - before.system


def main() -> None:
    allow_many_files()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            exchanges, cpu_seconds = runner.run(serve_job(json.load(sys.stdin)))
        answers = [asdict(read_answer(exchange)) for exchange in exchanges]
        json.dump({"answers": answers, "cpu_seconds": cpu_seconds}, sys.stdout)
    except (StreamFailedError, OSError) as error:
        json.dump({"error": str(error)}, sys.stdout)


if __name__ == "__main__":
    main()
