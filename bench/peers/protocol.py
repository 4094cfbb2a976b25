"""The worker's side of a conversation in JSON lines: load once, then answer one measurement at a time.

Runs in the environments of all engines, so it imports the standard library alone. The driver's side is process.py.

    driver                                                                       worker
    {"call": "generate", "arguments": {"prompts": [[1, 2]], "num_tokens": 1}}  →
                                                                               ←  {"seconds": 0.1, "result": [[3]], …}
    (end of input)                                                             →  (ends)

The model is loaded before the first answer, so the first answer is what start-up waits for. These calls are known;
every engine has the first two, and those that can keep something between two requests have the others:

    generate(prompts, num_tokens)               greedy; the new tokens of each prompt
    answer(prompts, most_tokens)                the same up to the end token
    beam_search(prompt, width, num_tokens)      {"token_ids": of all beams, best first, …}
    prepare(prompt)                             make the prompt known; all tokens that a search then finds before it
    search_behind(suffix, width, num_tokens)    the same as beam_search, behind what was prepared and a suffix
    hidden_states(prompt)                       {"seconds": …, "last": of the last token, "mean": over all}, all layers
                                                being read; ratoon_states.py has more
    structured(prompts, schemas, most_tokens)   sampled, each answer by its JSON schema: {"lengths": …, "ended": how
                                                many by a stop}
    sample(prompts, lengths)                    sampled, without schemas, exactly this long; the lengths

    beam_searches(prompts, width, num_tokens)   of several prompts at once: the tokens of all beams of each

Those of the workers for speech are in speech.py. A call that fails is answered
with {"error": …}, and the worker goes on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeAlias

TokenIds: TypeAlias = list[list[int]]
Calls: TypeAlias = dict[str, Callable[..., Any]]

MAX_MODEL_LEN = 2048  # positions that engines with a limit are started with, unless the driver asks for more
MAX_BEAM_WIDTH = 32  # of the searches that engines are compared on


def serve(load: Callable[[argparse.Namespace], Calls], packages: tuple[str, ...]) -> None:
    """Answer until the input ends. `load` takes the worker's options: model (a folder), threads, max_model_len, and
    settings: of the engine, in addition to the worker's own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("--settings", type=json.loads, default={}, metavar="JSON")
    args = parser.parse_args()
    # Answers have the pipe for themselves: whatever a library prints goes to standard error, and so into the log.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    calls = load(args)
    found = {name: _version(name) for name in packages}
    versions = {name: version for name, version in found.items() if version} or {packages[0]: "a checkout"}
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.perf_counter()
        try:
            result = calls[request["call"]](**request["arguments"])
            seconds = time.perf_counter() - begin
            answer = {"seconds": seconds, "result": result, "versions": versions}
        except Exception:
            answer = {"error": traceback.format_exc()}
        json.dump(answer, answers)
        answers.write("\n")
        answers.flush()


def _version(package: str) -> str | None:
    """Returns None for a package that is not installed: absent, or a checkout on the path."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
