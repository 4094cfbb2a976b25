"""Structured output on a GPU: milliseconds a token with JSON schemas, against the same without, in turns.

    python3 bench/gpu/structured.py --tokenizer TOKENIZER.json [--requests 8,32,128] [--tokens 192] [--rounds 3]
                                    [--no-jump-forward]

The model has random weights of a shape in models/. Its tokenizer is a real one, a `tokenizer.json` with at most as many
tokens: masks of a made-up vocabulary would be nothing like those of a real one. The schemas are arrays of objects that
do not end before the last token. "one schema": all requests have the same. A figure is (whole - the first token) / the
other tokens, so that compiling is left out; "first" is the first token's time, compiling included.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from compare_parts.models import copy_model

from ratoon import LLM, SamplingParams

SHAPES = Path(__file__).parent / "models"


def schema_of(seed: int) -> dict[str, Any]:
    """An array of objects with some names and values of each kind."""
    choose = random.Random(seed)
    names = [f"{word}_{choose.randrange(1000)}" for word in ("name", "size", "kind", "is_open", "tags")]
    values: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 24},
        {"type": "integer"},
        {"enum": [f"kind {choose.randrange(100)}" for _ in range(6)]},
        {"type": "boolean"},
        {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    ]
    each = {
        "type": "object",
        "properties": dict(zip(names, values)),
        "required": names,
        "additionalProperties": False,
    }
    return {"type": "array", "items": each, "minItems": 1000}


def params_of(kind: str, index: int, number: int, num_tokens: int) -> SamplingParams:
    asked: dict[str, Any] | None = None
    if kind != "free":
        seed = 1000 * number + (0 if kind == "one schema" else index)
        asked = {"json_schema": schema_of(seed)}
    return SamplingParams(temperature=0.8, seed=index, max_tokens=num_tokens, ignore_eos=True, structured_output=asked)


def measure(llm: LLM, kind: str, num_requests: int, number: int, num_tokens: int) -> tuple[float, float]:
    """Seconds of the first token, and of each later one."""
    choose = random.Random(f"{kind} {num_requests} {number}")
    seconds = []
    for count in (1, 1, num_tokens):  # compiling is in the first alone
        prompts = [[choose.randrange(1000, 40_000) for _ in range(128)] for _ in range(num_requests)]
        asked = [params_of(kind, index, number, count) for index in range(num_requests)]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, asked, progress=False)
        seconds.append(time.perf_counter() - begin)
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        assert lengths == {count}, f"{kind}: answers of {sorted(lengths)} tokens, not {count}"
    return seconds[0], (seconds[2] - seconds[1]) / (num_tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape in models/")
    parser.add_argument("--requests", default="8,32,128")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-jump-forward", action="store_true", help="sample tokens without a choice one by one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = copy_model(SHAPES / args.model, Path(scratch), args.tokenizer)
        settings = {"max_num_seqs": 256, "enable_prefix_caching": False, "disable_log_stats": True}
        settings["jump_forward"] = not args.no_jump_forward
        with LLM(str(folder), load_format="dummy", device=args.device, max_model_len=2048, **settings) as llm:
            kinds = ("free", "schemas", "one schema")
            for num_requests in map(int, args.requests.split(",")):
                found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
                for number in range(args.rounds + 1):
                    for kind in kinds if number % 2 else reversed(kinds):
                        figure = measure(llm, kind, num_requests, number, args.tokens)
                        if number > 0:  # the first one warms up
                            found[kind].append(figure)
                free = statistics.median(each for _, each in found["free"])
                for kind in kinds:
                    steps = [each for _, each in found[kind]]
                    record = {
                        "requests": num_requests,
                        "kind": kind,
                        "ms_a_token": round(1000 * statistics.median(steps), 3),
                        "spread": [round(1000 * min(steps), 3), round(1000 * max(steps), 3)],
                        "share_of_free": round(free / statistics.median(steps), 3),
                        "first_ms": round(1000 * statistics.median(first for first, _ in found[kind]), 1),
                    }
                    print("RESULT", json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
