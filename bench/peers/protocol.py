"""The worker's side of a conversation in JSON lines: load once, then answer one measurement at a time.

Runs in the environments of all engines, so it imports the standard library alone. The driver's side is process.py.

    driver                                                  worker
    {"prompts": [[1, 2]], "num_tokens": 1}            →
                                                      ←     {"seconds": 0.1, "token_ids": [[3]], "versions": {…}}
    (end of input)                                    →     (ends)

The model is loaded before the first answer, so the first answer is what start-up waits for.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from typing import TypeAlias

TokenIds: TypeAlias = list[list[int]]
Generate: TypeAlias = Callable[[TokenIds, int], TokenIds]  # prompts, tokens to generate for each → generated tokens

MAX_MODEL_LEN = 2048  # positions that engines with a limit are started with: more than any workload needs


def serve(load: Callable[[str, int], Generate], packages: tuple[str, ...]) -> None:
    """Answer until the input ends. `load` takes the model folder and the number of threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    # Answers have the pipe for themselves: whatever a library prints goes to standard error, and so into the log.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    generate = load(args.model, args.threads)
    versions = {name: importlib.metadata.version(name) for name in packages}
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.perf_counter()
        token_ids = generate(request["prompts"], request["num_tokens"])
        seconds = time.perf_counter() - begin
        json.dump({"seconds": seconds, "token_ids": token_ids, "versions": versions}, answers)
        answers.write("\n")
        answers.flush()
