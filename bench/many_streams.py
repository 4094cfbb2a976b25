"""A thousand open event streams against a real server whose device is a stub: is every stream served, and where does
the time go?

    .venv/bin/python bench/many_streams.py --json streams.json
    .venv/bin/python bench/many_streams.py --profile

The server, its engine process and the clients share the machine. Every answer is compared with what the stub must have
said for it. In the second phase some of the streams read nothing for a while: the others should not notice, the
server's memory should stay bounded, and the slow ones should get everything in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from export_hf import MODEL
from harness import Program, count, say
from service.figures import MEBIBYTE, StreamFigures
from service.server import STUB, ServerProcess, UsageRecord, watch_usage
from service.stream_client import ClientResult, StreamJob, run_clients
from service.streams import Answer, StreamFailedError
from stub_executor import STEP_SECONDS_VARIABLE, stub_token
from workloads import PromptSource

SEED = 1
PROMPT_TOKENS = 16
WARM_UP_STREAMS, WARM_UP_TOKENS = 50, 16
PROFILE_ROWS = 15
# Every event repeats the model's name. With a long one, an answer is larger than what the system's buffers hold, and
# the server has to keep the rest.
LONG_NAME = MODEL + "-with-a-long-name" * 120


class ManyStreams(Program):
    doc = __doc__
    rounds = None
    threads = False

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        count(parser, "--streams", 1000, "at once")
        count(parser, "--tokens", 128, "for each stream")
        parser.add_argument("--slow-streams", type=int, default=100, metavar="N", help="default: %(default)s; 0: none")
        parser.add_argument("--slow-seconds", type=float, default=10.0, metavar="X", help="default: %(default)s")
        count(parser, "--slow-tokens", 2500, "of those")
        parser.add_argument("--step-seconds", type=float, default=0.0, metavar="X", help="of the stub; default: none")
        count(parser, "--client-processes", 1)
        parser.add_argument("--profile", action="store_true", help="where the server's time goes; slows it a little")

    def check_options(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        if not 0 <= args.slow_streams < args.streams:
            parser.error(f"--slow-streams: {args.slow_streams}; expected fewer than --streams")

    def prepare(self) -> None:
        self._prompts = PromptSource(SEED)
        self._decode = _load_decoder()
        self._num_streams = 0  # so far; the next one's seed
        self._samples: dict[str, Any] | None = None  # of the profile

    def measure(self) -> None:
        args = self.args
        longest = PROMPT_TOKENS + max(args.tokens, args.slow_tokens)
        options = [MODEL, "--executor", STUB, "--max-num-seqs", str(args.streams), "--max-model-len", str(longest)]
        options += ["--served-model-name", MODEL, "--served-model-name", LONG_NAME]
        environment = {STEP_SECONDS_VARIABLE: str(args.step_seconds)}
        with tempfile.TemporaryDirectory() as folder:
            self._profile = Path(folder) / "profile.json" if args.profile else None
            with ServerProcess(options, environment, self._profile) as self._server:
                self.warm_up()
                self.all_read()
                if args.slow_streams:
                    self.some_read_late()
            if self._profile is not None:
                self._samples = json.loads(self._profile.read_text(encoding="utf-8"))

    def warm_up(self) -> None:
        self._check(*self._stream([self._job(WARM_UP_TOKENS) for _ in range(WARM_UP_STREAMS)]))

    def all_read(self) -> None:
        if self._profile is not None:
            self._server.toggle_profile()
        self._measure("all read", [self._job(self.args.tokens) for _ in range(self.args.streams)])
        if self._profile is not None:
            self._server.toggle_profile()

    def some_read_late(self) -> None:
        """First the same work without slow readers, for comparison."""
        num_slow = self.args.slow_streams
        for name, pause in (
            (f"{num_slow} have long answers, all read", 0.0),
            (f"{num_slow} have long answers and read nothing for {self.args.slow_seconds:g} s", self.args.slow_seconds),
        ):
            long = [self._job(self.args.slow_tokens, LONG_NAME, pause) for _ in range(num_slow)]
            self._measure(name, long + [self._job(self.args.tokens) for _ in range(self.args.streams - num_slow)])

    def _job(self, num_tokens: int, model: str = MODEL, pause_seconds: float = 0.0) -> StreamJob:
        self._num_streams += 1
        return StreamJob(model, self._prompts.prompt(PROMPT_TOKENS), num_tokens, self._num_streams, pause_seconds)

    def _stream(self, jobs: list[StreamJob]) -> tuple[list[StreamJob], ClientResult]:
        result = run_clients(self._server.host, self._server.port, jobs, self.args.client_processes)
        return jobs, result

    def _measure(self, name: str, jobs: list[StreamJob]) -> None:
        say(f"{name}: {len(jobs)} streams")
        with watch_usage(self._server) as usage:
            result = self._stream(jobs)[1]
        self._check(jobs, result)
        long = [answer for job, answer in zip(jobs, result.answers) if job.model == LONG_NAME]
        others = [answer for job, answer in zip(jobs, result.answers) if job.model != LONG_NAME]
        self.found[name] = {
            "streams": StreamFigures.of(others),
            "long": StreamFigures.of(long) if long else None,
            "most_open": most_open(result.answers),
            "usage": usage,
            "client_cpu_seconds": result.cpu_seconds,
        }

    def _check(self, jobs: list[StreamJob], result: ClientResult) -> None:
        """Every stream must have got its own answer, all of it, once."""
        for job, answer in zip(jobs, result.answers):
            tokens = [stub_token(job.seed, len(job.prompt) + index) for index in range(job.num_tokens)]
            if answer.text != self._decode(tokens) or answer.num_tokens != job.num_tokens:
                got = f"{answer.num_tokens} tokens, {len(answer.text)} characters, {answer.finish_reason}"
                raise StreamFailedError(f"a stream of {job.num_tokens} tokens got a wrong answer ({got})")

    def title(self) -> str:
        return f"{self.args.streams} streams of {self.args.tokens} tokens"

    def report(self) -> Iterator[str]:
        for name, phase in self.found.items():
            yield "\n".join(phase_lines(name, phase))
        if self._samples is not None:
            yield "\n".join(profile_lines(self._samples))

    def figures(self) -> dict[str, Any]:
        def as_dict(phase: dict[str, Any]) -> dict[str, Any]:
            own = {key: phase[key] and phase[key].as_dict() for key in ("streams", "long", "usage")}
            return {**phase, **own, "seconds": phase["usage"].seconds}

        return {"phases": {name: as_dict(phase) for name, phase in self.found.items()}}


def _load_decoder() -> Any:
    from ratoon.models.source import resolve_model

    return resolve_model(MODEL).load_tokenizer().decode


def most_open(answers: list[Answer]) -> int:
    """How many streams were open at the same time."""
    changes = sorted([(answer.sent, 1) for answer in answers] + [(answer.ended, -1) for answer in answers])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def phase_lines(name: str, phase: dict[str, Any]) -> Iterator[str]:
    yield f"{name} ({phase['most_open']} streams open at once)"
    for line in phase["streams"].lines():
        yield f"  {line}"
    if phase["long"] is not None:
        yield "  The lines above are of the others. Those with long answers got all of them:"
        for line in phase["long"].lines()[:2]:
            yield f"    {line}"
    usage: UsageRecord = phase["usage"]
    for role, figures in usage.as_dict().items():
        sizes = [f"{figures[key] / MEBIBYTE:.0f}" for key in ("memory_begin", "memory_peak", "memory_end")]
        yield f"  memory, {role:<7} {' → '.join(sizes)} MiB (before → most → after)"
    seconds = {role: usage.cpu_seconds(role) for role in usage.begin} | {"clients": phase["client_cpu_seconds"]}
    shares = ", ".join(f"{role} {used:.2f} s" for role, used in seconds.items())
    yield f"  processor time {shares}, of {usage.seconds * len(os.sched_getaffinity(0)):.2f} s on all cores"


def profile_lines(found: dict[str, Any]) -> Iterator[str]:
    total = found["samples"] or 1
    yield f"Where the server's processor time goes while all read ({total} samples)"
    packages: Counter[str] = Counter()
    for name, samples in found["innermost"].items():
        packages[package_of(name)] += samples
    for title, counts in (
        ("by package", packages),
        ("by function", Counter(found["innermost"])),
        ("by the function of Ratoon that it was spent for", Counter(found["ours"])),
    ):
        yield f"  {title}"
        for name, samples in counts.most_common(PROFILE_ROWS):
            yield f"    {samples / total:6.1%}  {name}"


def package_of(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "ratoon" else parts[0]


if __name__ == "__main__":
    sys.exit(ManyStreams().run())
