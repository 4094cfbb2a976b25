"""The real command with the real embedded model, in processes of its own, as a user runs it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.forked_engines import run_forked
from tests.real_models import needs_embedded_model as needs_model

MODEL = "smollm2-135m"
ENGINE = ["--kv-memory", "128MiB", "--threads", "1"]
COMMAND = [sys.executable, "-m", "ratoon"]
LIMIT = 600  # seconds; a run takes a few, but the machine may be busy


def ratoon(*arguments: str, text: str = "", is_forked: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs the command, with its modules loaded already unless it must not be forked (tests/forked_engines.py)."""
    kept = ("RATOON_DEVICE", "RATOON_CACHE_ROOT")
    environment = {name: value for name, value in os.environ.items() if name in kept or not name.startswith("RATOON_")}
    if is_forked:
        return run_forked(*arguments, env=environment, text=text)
    return subprocess.run(
        [*COMMAND, *arguments], input=text, capture_output=True, text=True, timeout=LIMIT, env=environment, check=False
    )


# A pseudo-terminal does not say where its cursor is.
TERMINAL = {"TERM": "xterm", "COLUMNS": "100", "PROMPT_TOOLKIT_NO_CPR": "1"}


class Terminal:
    """A command on a terminal of its own."""

    PROMPT = r"\x1b\[\?2004h"  # the chat's editor asks for marks around what is pasted, and is ready to read
    FIRST_WORD = r"\x1b\[2K\w+"  # where the spinner was

    def __init__(self, *arguments: str) -> None:
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            os.execvpe(COMMAND[0], [*COMMAND, *arguments], {**os.environ, **TERMINAL})
        self._received = b""
        self._num_seen = 0
        self._ended = False

    def send(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def wait_for(self, pattern: str) -> None:
        """Read on until the pattern appears in what came since the last match."""
        deadline = time.monotonic() + LIMIT
        while not (match := re.search(pattern.encode(), self._received[self._num_seen :])):
            if time.monotonic() > deadline or not self._read():
                raise AssertionError(f"{pattern!r} did not appear in {self._received[self._num_seen :]!r}")
        self._num_seen += match.end()

    def exit_code(self) -> int:
        deadline = time.monotonic() + LIMIT
        while self._read():
            assert time.monotonic() < deadline, "the command does not end"
        _, status = os.waitpid(self.pid, 0)
        self._ended = True
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        if not self._ended:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._descriptor], [], [], 1.0)
        if ready:
            try:
                data = os.read(self._descriptor, 4096)
            except OSError:  # the other end is closed
                return False
            self._received += data
            return bool(data)
        return True


def test_help_names_the_commands():
    result = ratoon("--help", is_forked=False)
    assert result.returncode == 0
    for command in ("generate", "chat", "info", "bench", "demo"):
        assert command in result.stdout


def test_an_unknown_model_is_an_error_in_one_line():
    result = ratoon("generate", "no-such-model", "hi")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: no-such-model") and result.stderr.count("\n") == 1


@pytest.mark.slow
@needs_model
def test_generate_answers_through_the_chat_template():
    result = ratoon("generate", MODEL, "What colour is the sky?", *ENGINE, is_forked=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "blue" in result.stdout


@pytest.mark.slow
@needs_model
def test_generate_reads_standard_input_and_answers_many_prompts_as_json():
    result = ratoon(
        "generate", MODEL, "-", "One plus one is", "--raw", "--json", "--logprobs", "2", "--max-tokens", "6", *ENGINE,
        text="The capital of France is",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first["prompt"] == "The capital of France is"
    assert "Paris" in first["outputs"][0]["text"]
    assert len(second["outputs"][0]["token_ids"]) == len(second["outputs"][0]["logprobs"]) == 6
    assert second["outputs"][0]["finish_reason"] == "length"


@pytest.mark.slow
@needs_model
def test_ctrl_c_ends_generate_with_130():
    process = subprocess.Popen(
        [
            *COMMAND,
            "generate",
            MODEL,
            "Write a long story.",
            "--stream",
            "--ignore-eos",
            "--max-tokens",
            "2000",
            *ENGINE,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(5)  # it is under way
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.slow
@needs_model
def test_a_reader_that_leaves_is_no_error():
    process = subprocess.Popen(
        [*COMMAND, "generate", MODEL, "Count to fifty.", "--stream", "--ignore-eos", "--max-tokens", "500", *ENGINE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=LIMIT) == 141
    assert process.stderr.read() == ""


@pytest.mark.slow
@needs_model
def test_chat_on_a_terminal_ctrl_c_stops_the_answer_and_the_next_turn_uses_the_cache():
    shape = ["--ignore-eos", "--max-tokens", "60", "--system", "You tell stories. " * 8]
    terminal = Terminal("chat", MODEL, *shape, *ENGINE)
    try:
        terminal.wait_for(Terminal.PROMPT)
        terminal.send("Tell me a story.\n")
        terminal.wait_for("waiting for the first token")
        terminal.wait_for(Terminal.FIRST_WORD)
        terminal.send("\x03")
        terminal.wait_for(r"\(stopped; \d+ tokens")
        terminal.wait_for(Terminal.PROMPT)
        terminal.send("And then?\n")
        terminal.wait_for(r"\d+ tokens, [\d.]+ tok/s, [1-9]\d* of \d+ prompt tokens cached")
        terminal.wait_for(Terminal.PROMPT)  # a Ctrl-D that comes before the prompt is lost
        terminal.send("\x04")
        assert terminal.exit_code() == 0
    finally:
        terminal.kill()


@pytest.mark.slow
@needs_model
def test_info_tells_memory_and_start_up():
    result = ratoon("info", MODEL, "--json", *ENGINE, is_forked=False)
    facts = json.loads(result.stdout)
    assert facts["model"]["architecture"] == "LlamaForCausalLM"
    assert facts["memory"]["kv_bytes"] <= 128 * 2**20
    # SmolLM2-135M: 30 layers, 3 heads for keys and 3 for values, of 64 numbers each.
    # They are kept in float16, since the file is in 4 bits.
    assert facts["memory"]["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert {"find model", "load tokenizer", "import torch", "total"} <= set(facts["startup_seconds"])


@pytest.mark.slow
@needs_model
def test_bench_measures():
    result = ratoon(
        "bench", "latency", MODEL, "--input-len", "32", "--output-len", "8", "--repeat", "2", "--json", *ENGINE
    )
    figures = json.loads(result.stdout)
    assert figures["time_to_first_token_ms"]["median"] > 0
    assert figures["output_tokens_per_second"]["median"] > 0


@pytest.mark.slow
@needs_model
def test_demo_runs_to_its_end_and_shares_a_prefix():
    result = ratoon("demo", *ENGINE)
    assert (result.returncode, result.stderr) == (0, "")
    second = next(line for line in result.stdout.splitlines() if line.startswith("library 2"))
    _, _, num_prompt, num_cached, num_output, *_ = second.split()
    assert int(num_cached) > 0.8 * int(num_prompt)
    assert int(num_output) > 20
    assert "came from the prefix cache" in result.stdout
