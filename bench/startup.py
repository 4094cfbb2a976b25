"""How long Ratoon takes to start: `import ratoon`, and `ratoon generate` up to the first token on the screen.

    .venv/bin/python bench/startup.py --json startup.json

The peer is transformers, from the start of its process to its first token: it imports, loads the model (no tokenizer)
and generates one token. All take turns, round by round.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from export_hf import CACHE_FOLDER, DEFAULT_FOLDER, MODEL, export_model
from harness import Program, format_spread, ratios_of, say, spread
from peers.machine import usable_cores
from peers.process import EngineProcess, engine_environment
from workloads import PromptSource

PROMPT = "Write one sentence about rice."
TIMED_IMPORT = "import time; t = time.perf_counter(); import ratoon; print(time.perf_counter() - t)"
IMPORT, GENERATE, PEER = "import ratoon", f"ratoon generate {MODEL}: first token", "transformers: first token"


class Startup(Program):
    doc = __doc__
    threads = False

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--no-peer", action="store_true", help="Ratoon alone")

    def measure(self) -> None:
        measurements: dict[str, Callable[[], float]] = {IMPORT: time_import, GENERATE: time_generate}
        if not self.args.no_peer:
            export_model(MODEL, DEFAULT_FOLDER)
            measurements[PEER] = time_transformers
        self.found = {name: [] for name in measurements}
        for index in range(-1, self.args.rounds):  # the first one only brings files into memory
            for name, measure in measurements.items():
                say(f"round {index + 1}/{self.args.rounds}: {name}")
                value = measure()
                if index >= 0:
                    self.found[name].append(value)

    def report(self) -> Iterator[str]:
        lines = [f"{name:<42}{format_spread(spread(values))}" for name, values in self.found.items()]
        if PEER in self.found:
            ratio = format_spread(ratios_of(self.found[PEER], self.found[GENERATE]), "×")
            lines.append(f"{'times faster than transformers':<42}{ratio}")
        yield "\n".join([f"{self.args.rounds} rounds; seconds, median (min–max)", *lines])

    def figures(self) -> dict[str, Any]:
        return {"seconds": self.found}


def time_import() -> float:
    """Returns the seconds of the statement itself; Python's own start is not in them."""
    done = subprocess.run([sys.executable, "-c", TIMED_IMPORT], check=True, capture_output=True, text=True)
    return float(done.stdout)


def time_generate() -> float:
    """Returns the seconds from the start of the process to the first byte of the answer."""
    program = Path(sys.executable).with_name("ratoon")
    command = [str(program), "generate", MODEL, PROMPT, "--max-tokens", "1", "--stream"]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=engine_environment("ratoon", 0), bufsize=0) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - begin
        process.stdout.read()
    if not first.strip() or process.returncode != 0:
        raise SystemExit(f"error: {' '.join(command)} gave no answer (exit status {process.returncode})")
    return seconds


def time_transformers() -> float:
    log = CACHE_FOLDER / "logs" / "transformers-startup.log"
    engine = EngineProcess("transformers", sys.executable, DEFAULT_FOLDER, len(usable_cores()), log)
    try:
        return engine.start(PromptSource(0).prompt(32))
    finally:
        engine.close()


if __name__ == "__main__":
    sys.exit(Startup().run())
