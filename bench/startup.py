"""How long Ratoon takes to start: `import ratoon`, and `ratoon generate` up to the first token on the screen.

    .venv/bin/python bench/startup.py --json startup.json

The peer is transformers, from the start of its process to its first token: it imports, loads the model (no tokenizer)
and generates one token. All take turns, round by round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cpu_peers import QUIET_LIMIT_SECONDS, SEED, format_spread, say, spread
from export_hf import CACHE_FOLDER, DEFAULT_FOLDER, MODEL, export_model
from peers.machine import describe_machine, usable_cores, wait_for_quiet_machine
from peers.process import EngineProcess, engine_environment
from workloads import PromptSource

PROMPT = "Write one sentence about rice."
TIMED_IMPORT = "import time; t = time.perf_counter(); import ratoon; print(time.perf_counter() - t)"
IMPORT, GENERATE, PEER = "import ratoon", f"ratoon generate {MODEL}: first token", "transformers: first token"


def time_import() -> float:
    """Seconds of the statement itself; Python's own start is not in them."""
    done = subprocess.run([sys.executable, "-c", TIMED_IMPORT], check=True, capture_output=True, text=True)
    return float(done.stdout)


def time_generate() -> float:
    """Seconds from the start of the process to the first byte of the answer."""
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
        return engine.start(PromptSource(SEED).prompt(32))
    finally:
        engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write all times")
    parser.add_argument("--no-peer", action="store_true", help="Ratoon alone")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: {args.rounds}; expected at least 1")
    measurements: dict[str, Callable[[], float]] = {IMPORT: time_import, GENERATE: time_generate}
    if not args.no_peer:
        export_model(MODEL, DEFAULT_FOLDER)
        measurements[PEER] = time_transformers
    quiet = None if args.no_wait else wait_for_quiet_machine(QUIET_LIMIT_SECONDS)
    seconds: dict[str, list[float]] = {name: [] for name in measurements}
    for round_index in range(-1, args.rounds):  # the first one only brings files into memory
        for name, measure in measurements.items():
            say(f"round {round_index + 1}/{args.rounds}: {name}")
            value = measure()
            if round_index >= 0:
                seconds[name].append(value)
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['cores']} cores, {args.rounds} rounds; seconds, median (min–max)")
    if quiet is False:
        print(f"Warning: the machine did not get quiet within {QUIET_LIMIT_SECONDS} s.")
    for name, values in seconds.items():
        print(f"{name:<42}{format_spread(spread(values))}")
    if PEER in seconds:
        ratios = [theirs / ours for ours, theirs in zip(seconds[GENERATE], seconds[PEER])]
        print(f"{'times faster than transformers':<42}{format_spread(spread(ratios), '×')}")
    if args.json:
        result = {"machine": machine, "quiet_at_start": quiet, "seconds": seconds}
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
