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
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from cpu_peers import QUIET_LIMIT_SECONDS, say
from export_hf import MODEL
from peers.machine import describe_machine, wait_for_quiet_machine
from service.figures import MEBIBYTE, StreamFigures
from service.server import STUB, ServerFailedError, ServerProcess, UsageRecord, watch_usage
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


class Run:
    def __init__(self, args: argparse.Namespace, server: ServerProcess, profile: Path | None) -> None:
        self.args = args
        self._server = server
        self._profile = profile
        self._prompts = PromptSource(SEED)
        self._decode = _load_decoder()
        self._num_streams = 0  # so far; the next one's seed
        self.phases: dict[str, dict[str, Any]] = {}

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
        self.phases[name] = {
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


def print_phase(name: str, phase: dict[str, Any]) -> None:
    print(f"\n{name} ({phase['most_open']} streams open at once)")
    for line in phase["streams"].lines():
        print(f"  {line}")
    if phase["long"] is not None:
        print("  The lines above are of the others. Those with long answers got all of them:")
        for line in phase["long"].lines()[:2]:
            print(f"    {line}")
    usage: UsageRecord = phase["usage"]
    for role, figures in usage.as_dict().items():
        sizes = [f"{figures[key] / MEBIBYTE:.0f}" for key in ("memory_begin", "memory_peak", "memory_end")]
        print(f"  memory, {role:<7} {' → '.join(sizes)} MiB (before → most → after)")
    seconds = {role: usage.cpu_seconds(role) for role in usage.begin} | {"clients": phase["client_cpu_seconds"]}
    shares = ", ".join(f"{role} {used:.2f} s" for role, used in seconds.items())
    print(f"  processor time {shares}, of {usage.seconds * len(os.sched_getaffinity(0)):.2f} s on all cores")


def print_profile(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    total = found["samples"] or 1
    print(f"\nWhere the server's processor time goes while all read ({total} samples)")
    packages: Counter[str] = Counter()
    for name, count in found["innermost"].items():
        packages[package_of(name)] += count
    for title, counts in (
        ("by package", packages),
        ("by function", Counter(found["innermost"])),
        ("by the function of Ratoon that it was spent for", Counter(found["ours"])),
    ):
        print(f"  {title}")
        for name, count in counts.most_common(PROFILE_ROWS):
            print(f"    {count / total:6.1%}  {name}")


def package_of(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "ratoon" else parts[0]


def as_json(run: Run, quiet: bool | None) -> dict[str, Any]:
    phases = {}
    for name, phase in run.phases.items():
        long = phase["long"]
        phases[name] = {
            "streams": phase["streams"].as_dict(),
            "long": None if long is None else long.as_dict(),
            "most_open": phase["most_open"],
            "usage": phase["usage"].as_dict(),
            "seconds": phase["usage"].seconds,
            "client_cpu_seconds": phase["client_cpu_seconds"],
        }
    settings = {name: value for name, value in vars(run.args).items() if name != "json"}
    return {"machine": describe_machine(), "settings": settings, "quiet_at_start": quiet, "phases": phases}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("--streams", type=int, default=1000, metavar="N", help="at once; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="for each stream; default: %(default)s")
    parser.add_argument("--slow-streams", type=int, default=100, metavar="N", help="default: %(default)s; 0 for none")
    parser.add_argument("--slow-seconds", type=float, default=10.0, metavar="X", help="default: %(default)s")
    parser.add_argument("--slow-tokens", type=int, default=2500, metavar="N", help="of those; default: %(default)s")
    parser.add_argument("--step-seconds", type=float, default=0.0, metavar="X", help="of the stub; default: none")
    parser.add_argument("--client-processes", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--profile", action="store_true", help="where the server's time goes; slows it down a little")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write all figures")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine")
    args = parser.parse_args()
    for option in ("streams", "tokens", "slow_tokens", "client_processes"):
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')}: {getattr(args, option)}; expected at least 1")
    if not 0 <= args.slow_streams < args.streams:
        parser.error(f"--slow-streams: {args.slow_streams}; expected fewer than --streams")
    return args


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is ended
    quiet = None if args.no_wait else wait_for_quiet_machine(QUIET_LIMIT_SECONDS)
    longest = PROMPT_TOKENS + max(args.tokens, args.slow_tokens)
    options = [MODEL, "--executor", STUB, "--max-num-seqs", str(args.streams), "--max-model-len", str(longest)]
    options += ["--served-model-name", MODEL, "--served-model-name", LONG_NAME]
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json" if args.profile else None
        environment = {STEP_SECONDS_VARIABLE: str(args.step_seconds)}
        try:
            with ServerProcess(options, environment, profile) as server:
                run = Run(args, server, profile)
                run.warm_up()
                run.all_read()
                if args.slow_streams:
                    run.some_read_late()
        except (ServerFailedError, StreamFailedError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        machine = describe_machine()
        print(f"{machine['cpu']}, {machine['cores']} cores; {args.streams} streams of {args.tokens} tokens")
        if quiet is False:
            print(f"Warning: the machine did not get quiet within {QUIET_LIMIT_SECONDS} s.")
        for name, phase in run.phases.items():
            print_phase(name, phase)
        if profile is not None:
            print_profile(profile)
    if args.json:
        args.json.write_text(json.dumps(as_json(run, quiet), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
