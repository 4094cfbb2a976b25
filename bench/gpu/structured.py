"""Structured output on a GPU: milliseconds a token with JSON schemas, against the same without, in turns, by Ratoon and
by vLLM in one run.

    python3 bench/gpu/structured.py --tokenizer TOKENIZER.json [--requests 8,32,128] [--tokens 192] [--rounds 3]
                                    [--no-jump-forward] [--vllm-python PYTHON] [--vllm-backend guidance]

The model has random weights of a shape in models/. Its tokenizer is a real one, a `tokenizer.json` with at most as many
tokens: masks of a made-up vocabulary would be nothing like those of a real one. The schemas are arrays of objects that
do not end before the last token. "one schema": all requests have the same. A figure is (whole - the first token) / the
other tokens, so that compiling is left out; "first" is the first token's time, compiling included. Each engine is a
process of its own, one after the other.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).parent / "models"
KINDS = ("free", "schemas", "one schema")
MAX_MODEL_LEN = 2048


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


def schema_for(kind: str, index: int, number: int) -> dict[str, Any] | None:
    """Returns the schema of a request in a round; None: its text is free."""
    return None if kind == "free" else schema_of(1000 * number + (0 if kind == "one schema" else index))


class Ratoon:
    def __init__(self, model: str, args: argparse.Namespace) -> None:
        import compare_parts  # noqa: F401  # by which the package of this repository is found

        from ratoon import LLM, SamplingParams

        self._params = SamplingParams
        self._llm = LLM(
            model, load_format="dummy", device=args.device, max_model_len=MAX_MODEL_LEN, max_num_seqs=256,
            enable_prefix_caching=False, disable_log_stats=True, jump_forward=not args.no_jump_forward,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], schemas: list[dict[str, Any] | None], num_tokens: int) -> list[int]:
        params = [
            self._params(
                temperature=0.8, seed=index, max_tokens=num_tokens, ignore_eos=True,
                structured_output=None if schema is None else {"json_schema": schema},
            )
            for index, schema in enumerate(schemas)
        ]  # fmt: skip
        outputs = self._llm.generate(prompts, params, progress=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


class VLLM:
    def __init__(self, model: str, args: argparse.Namespace) -> None:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        self._params, self._structured = SamplingParams, StructuredOutputsParams
        self._llm = LLM(
            model, load_format="dummy", max_model_len=MAX_MODEL_LEN, max_num_seqs=256, enable_prefix_caching=False,
            disable_log_stats=True, structured_outputs_config={"backend": args.vllm_backend},
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], schemas: list[dict[str, Any] | None], num_tokens: int) -> list[int]:
        params = [
            self._params(
                temperature=0.8, max_tokens=num_tokens, ignore_eos=True,
                structured_outputs=None if schema is None else self._structured(json=schema),
            )
            for schema in schemas
        ]  # fmt: skip
        texts = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [len(output.outputs[0].token_ids) for output in self._llm.generate(texts, params, use_tqdm=False)]


def measure(engine: Ratoon | VLLM, kind: str, num_requests: int, number: int, num_tokens: int) -> tuple[float, float]:
    """Returns the seconds of the first token, and of each later one."""
    choose = random.Random(f"{kind} {num_requests} {number}")
    schemas = [schema_for(kind, index, number) for index in range(num_requests)]
    seconds = []
    for count in (1, 1, num_tokens):  # compiling is in the first alone
        prompts = [[choose.randrange(1000, 40_000) for _ in range(128)] for _ in range(num_requests)]
        begin = time.perf_counter()
        lengths = set(engine.generate(prompts, schemas, count))
        seconds.append(time.perf_counter() - begin)
        assert lengths == {count}, f"{kind}: answers of {sorted(lengths)} tokens, not {count}"
    return seconds[0], (seconds[2] - seconds[1]) / (num_tokens - 1)


def work(args: argparse.Namespace) -> None:
    """Measures one engine, in its own process."""
    engine = {"ratoon": Ratoon, "vllm": VLLM}[args.worker](str(args.folder), args)
    for num_requests in map(int, args.requests.split(",")):
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for number in range(args.rounds + 1):
            for kind in KINDS if number % 2 else reversed(KINDS):
                figure = measure(engine, kind, num_requests, number, args.tokens)
                if number > 0:  # the first one warms up
                    found[kind].append(figure)
        free = statistics.median(each for _, each in found["free"])
        for kind in KINDS:
            steps = [each for _, each in found[kind]]
            record = {
                "engine": args.worker,
                "requests": num_requests,
                "kind": kind,
                "ms_a_token": round(1000 * statistics.median(steps), 3),
                "spread": [round(1000 * min(steps), 3), round(1000 * max(steps), 3)],
                "share_of_free": round(free / statistics.median(steps), 3),
                "first_ms": round(1000 * statistics.median(first for first, _ in found[kind]), 1),
            }
            print("RESULT", json.dumps(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape in models/")
    parser.add_argument("--requests", default="8,32,128")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-jump-forward", action="store_true", help="sample tokens without a choice one by one")
    parser.add_argument("--vllm-python", help="of an environment that has vLLM; without it, Ratoon alone")
    parser.add_argument("--vllm-backend", default="auto", help="of vLLM's structured output (default %(default)s)")
    parser.add_argument("--worker", choices=("ratoon", "vllm"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    from compare_parts.models import copy_model

    with tempfile.TemporaryDirectory() as scratch:
        folder = copy_model(SHAPES / args.model, Path(scratch), args.tokenizer)
        pythons = {"ratoon": sys.executable} | ({"vllm": args.vllm_python} if args.vllm_python else {})
        for engine, python in pythons.items():
            command = [python, __file__, *sys.argv[1:], "--worker", engine, "--folder", str(folder)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
