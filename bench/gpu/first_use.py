"""The first request of every kind on a GPU, against the second and third: what compiling, loading and capturing cost.

    python3 bench/gpu/first_use.py [--model qwen3-0.6b] [--tokenizer TOKENIZER.json] [--process] [--idle SECONDS]

Each kind runs three times with other tokens, in a process that has answered nothing before. "new schema" has another
schema each time, so that each of its requests compiles one; "schema" has one that the first request compiles. On a
machine whose kernels are compiled the first should take at most 1.5 times the second; run it twice to see that: the
first run compiles. `--process`: the engine has a process of its own, as that of a server, which prepares what it
expects while it has no work; `--idle`: seconds without work before the first kind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from compare_parts.models import copy_model

from ratoon import LLM, BeamSearchParams, SamplingParams

SHAPES = Path(__file__).parent / "models"
NEW_SCHEMA = itertools.count(100)  # the least items of the next one


def kinds(llm: LLM, with_grammars: bool) -> dict[str, Callable[[], object]]:
    choose = random.Random(1)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[choose.randrange(1000, 40_000) for _ in range(length)] for _ in range(count)]

    def generate(count: int, length: int, num_tokens: int = 16, **params: object) -> Callable[[], object]:
        asked = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **params)  # type: ignore[arg-type]
        return lambda: llm.generate(prompts(count, length), asked, progress=False)

    first = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    (root,) = llm.generate(prompts(1, 700), first, retain_kv=600.0, progress=False)

    def go_on() -> object:
        asked = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)
        (suffix,) = prompts(1, 5)
        return llm.generate_continuation(root, suffix, asked)

    found = {
        "greedy": generate(1, 128, temperature=0.0),
        "sampled": generate(1, 128, temperature=0.8, seed=1),
        "filtered": generate(1, 128, temperature=0.8, top_p=0.9, top_k=40, seed=1),
        "logprobs": generate(1, 128, temperature=0.0, logprobs=5),
        "penalties": generate(1, 128, temperature=0.0, presence_penalty=0.5),
        "four choices": generate(1, 128, temperature=0.8, seed=1, n=4),
        "continuation": go_on,
        "beams": lambda: llm.beam_search(prompts(1, 128), BeamSearchParams(beam_width=8, max_tokens=8)),
        "long prompt": generate(1, 1900, temperature=0.0),
        "32 requests": generate(32, 128, temperature=0.0),
        "256 requests": generate(256, 128, 64, temperature=0.0),
    }
    if with_grammars:
        same = schema_of(99)
        found["new schema"] = lambda: generate(1, 128, temperature=0.0, structured_output=schema_of(next(NEW_SCHEMA)))()
        found["schema"] = generate(1, 128, temperature=0.0, structured_output=same)
        found["32 schemas"] = generate(32, 128, temperature=0.0, structured_output=same)
    return found


def schema_of(least_items: int) -> dict[str, object]:
    return {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": least_items}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape in models/")
    parser.add_argument("--process", action="store_true")
    parser.add_argument("--idle", type=float, default=0.0)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = copy_model(SHAPES / args.model, Path(scratch), args.tokenizer)
        begin = time.perf_counter()
        settings = {"load_format": "dummy", "device": args.device, "max_model_len": 2048, "max_num_seqs": 256}
        with LLM(str(folder), process=args.process, **settings) as llm:
            print(f"start-up {time.perf_counter() - begin:.1f} s")
            if args.process and args.tokenizer is not None:
                llm.start_grammars()  # as a server does
            time.sleep(args.idle)
            for kind, run in kinds(llm, args.tokenizer is not None).items():
                seconds = []
                for _ in range(3):
                    begin = time.perf_counter()
                    run()
                    seconds.append(time.perf_counter() - begin)
                first, second, third = (1000 * each for each in seconds)
                record = {
                    "kind": kind,
                    "first_ms": round(first, 2),
                    "second_ms": round(second, 2),
                    "third_ms": round(third, 2),
                    "first_to_second": round(first / second, 2),
                }
                print("RESULT", json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
