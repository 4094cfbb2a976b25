"""The driver's side of a worker: start it, ask it, pause it while another one has the machine, end it.

A worker runs in a session of its own, so that all its processes can be paused and ended together.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from peers.machine import busy_seconds, processes_of, usable_cores
from peers.protocol import MAX_MODEL_LEN, TokenIds

BENCH_FOLDER = Path(__file__).resolve().parent.parent
SECONDS_TO_END = 20
SECONDS_TO_TIDY_UP = 5
SECONDS_TO_TELL = 1  # minimum duration of a call for a meaningful foreign share: processor times come in ticks


class EngineFailedError(Exception):
    """A worker ended or sent an invalid answer; the message has the end of its log."""


class CallFailedError(EngineFailedError):
    """A call raised an exception in the worker, which takes further calls; the message is the traceback."""


@dataclass(frozen=True)
class CallResult:
    """A call of protocol.py."""

    seconds: float
    value: Any
    foreign_share: float | None  # of all cores, used by other processes meanwhile; None: unknown


@dataclass(frozen=True)
class Generation:
    seconds: float
    token_ids: TokenIds
    foreign_share: float | None


class EngineProcess:
    """One engine. It is paused whenever no call of ours is under way, unless `pausing` is off."""

    def __init__(
        self,
        engine: str,
        python: str,
        model: Path,
        threads: int,
        log: Path,
        max_model_len: int = MAX_MODEL_LEN,
        worker: str | None = None,  # the module in this package that runs, if it is not the engine's first
        settings: dict[str, Any] | None = None,  # of the engine, in addition to the worker's own
        environment: dict[str, str] | None = None,  # in addition to `engine_environment`
        pausing: bool = True,
    ) -> None:
        self.engine = engine
        self.log = log
        self.versions: dict[str, str] = {}
        self.foreign_shares: list[float] = []  # of the longer calls
        self._command = [python, "-m", f"peers.{worker or f'{engine}_worker'}", str(model.resolve())]
        self._command += ["--threads", str(threads), "--max-model-len", str(max_model_len)]
        if settings:
            self._command += ["--settings", json.dumps(settings)]
        self._pausing = pausing
        self._environment = engine_environment(engine, threads) | (environment or {})
        self._process: subprocess.Popen[str] | None = None

    def start(self, prompt: list[int]) -> float:
        """Seconds from the start of the process to the first token of its answer to this prompt."""
        return self.start_with("generate", prompts=[prompt], num_tokens=1)

    def start_with(self, name: str, **arguments: Any) -> float:
        """The same to the answer to any first call."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=BENCH_FOLDER,  # where the worker finds the package `peers`
                env=self._environment,
                text=True,
                start_new_session=True,
            )
        answer = self._ask(name, arguments)
        seconds = time.perf_counter() - begin
        self.versions = answer["versions"]
        self._pause(signal.SIGSTOP)
        return seconds

    def generate(self, prompts: TokenIds, num_tokens: int) -> Generation:
        """Greedy, exactly `num_tokens` for each prompt."""
        result = self.call("generate", prompts=prompts, num_tokens=num_tokens)
        lengths = [len(tokens) for tokens in result.value]
        if lengths != [num_tokens] * len(prompts):
            raise EngineFailedError(f"{self.engine} generated {lengths} tokens, not {num_tokens} for each prompt")
        return Generation(result.seconds, result.value, result.foreign_share)

    def call(self, name: str, **arguments: Any) -> CallResult:
        """The time is the worker's own, around the engine's call."""
        self._pause(signal.SIGCONT)
        busy_before, ours_before, begin = busy_seconds(), self._cpu_seconds(), time.perf_counter()
        answer = self._ask(name, arguments)
        busy_after, ours_after, end = busy_seconds(), self._cpu_seconds(), time.perf_counter()
        self._pause(signal.SIGSTOP)
        foreign_share = None
        if busy_before is not None and busy_after is not None:
            foreign = (busy_after - busy_before) - (ours_after - ours_before)
            foreign_share = max(0.0, foreign / ((end - begin) * (os.cpu_count() or 1)))
            if end - begin >= SECONDS_TO_TELL:
                self.foreign_shares.append(foreign_share)
        return CallResult(answer["seconds"], answer["result"], foreign_share)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End it at once, from any thread: a call that is under way fails. `close` comes after it."""
        process = self._process
        if process is not None:
            _signal_each(set(processes_of(process.pid)), signal.SIGKILL)

    def close(self) -> None:
        """End the worker and every process that it has started. Safe to call at any time, and twice."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal_each(set(processes_of(process.pid)), signal.SIGCONT)
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.close()
            process.wait(timeout=SECONDS_TO_END)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        deadline = time.monotonic() + SECONDS_TO_TIDY_UP
        while processes_of(process.pid) and process.poll() is not None and time.monotonic() < deadline:
            time.sleep(0.1)  # the worker has ended, helpers of it still remove its shared memory
        _signal_each(set(processes_of(process.pid)), signal.SIGKILL)
        process.wait()
        process.stdout.close()

    def _ask(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None, "start() comes first"
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        line = _exchange(stdin, stdout, json.dumps({"call": name, "arguments": arguments}))
        if not line.endswith("\n"):
            raise EngineFailedError(
                f"{self.engine} ended without an answer; its log, {self.log}, ends with:\n{self._tail()}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CallFailedError(f"{self.engine}, {name}: {answer['error']}")
        return answer

    def _tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def _cpu_seconds(self) -> float:
        assert self._process is not None
        own = os.times()
        return sum(processes_of(self._process.pid).values()) + own.user + own.system

    def _pause(self, number: signal.Signals) -> None:
        """Stop or continue all its processes."""
        if self._pausing:
            assert self._process is not None
            _signal_each(set(processes_of(self._process.pid)), number)


def _exchange(stdin: IO[str], stdout: IO[str], line: str) -> str:
    try:
        stdin.write(line + "\n")
        stdin.flush()
    except BrokenPipeError:
        return ""
    return stdout.readline()


def _signal_each(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # ended meanwhile


def engine_environment(engine: str, threads: int) -> dict[str, str]:
    """Models are on the disk: nothing looks for a network. Settings of threads in the caller's shell do not count, and
    no engine compiles its modules at each start."""
    not_passed_on = ("OMP_", "GOMP_", "KMP_", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(not_passed_on)}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if engine == "vllm":
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, usable_cores()[:threads])),  # or it leaves a core idle
            "VLLM_NO_USAGE_STATS": "1",
        }
    if engine == "ctranslate2":
        environment["OMP_WAIT_POLICY"] = "passive"  # it has threads of its own, which those of OpenMP would disturb
    return environment


def engine_python(engine: str, vllm_python: str | None = None, ctranslate2_python: str | None = None) -> str:
    """The interpreter whose environment has the engine: this one, unless another is given."""
    python = {"vllm": vllm_python, "ctranslate2": ctranslate2_python}.get(engine)
    # Not resolved: the link is what makes it a virtual environment.
    return sys.executable if python is None else os.path.abspath(python)
