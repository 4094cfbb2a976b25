"""Ratoon, through its LLM class; beam searches one level below it, where each step's time can be seen.

The model is a folder or a GGUF file, and runs on the CPU unless the settings name a device. Hidden states are in
ratoon_states.py. For GPUs there are calls for many searches at once, and for continuations of leased requests.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from peers.protocol import Calls, TokenIds, serve
from peers.ratoon_states import Known, state_calls
from ratoon.core.worker import LOOKED_UP

LEASE_SECONDS = 3600


def load(args: argparse.Namespace) -> Calls:
    from ratoon import LLM, SamplingParams

    settings = {"max_model_len": args.max_model_len, "skip_tokenizer": not has_tokenizer(Path(args.model))}
    if "device" not in args.settings:  # 2 GiB is what vLLM gets
        settings |= {"device": "cpu", "dtype": "float32", "num_threads": args.threads, "kv_memory": "2GiB"}
    llm = LLM(args.model, **{**settings, **args.settings})

    def generate(prompts: TokenIds, num_tokens: int | list[int], temperature: float = 0.0) -> TokenIds:
        lengths = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
        params = [
            SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in lengths
        ]
        outputs = llm.generate(prompts, params, progress=False)
        return [list(checked(output).outputs[0].token_ids) for output in outputs]

    def answer(prompts: TokenIds, most_tokens: int) -> TokenIds:
        params = SamplingParams(temperature=0.0, max_tokens=most_tokens, detokenize=False)
        outputs = llm.generate(prompts, params, progress=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    known = Known()
    facts = {"read_bytes": lambda: read_bytes(llm), "describe": lambda: describe(llm)}
    facts["reset_prefix_cache"] = llm.reset_prefix_cache
    calls = {"generate": generate, "answer": answer, **facts, **_searches(llm, known), **_device_calls(llm)}
    return {**calls, **state_calls(llm, known)}


def describe(llm: Any) -> dict[str, Any]:
    """Returns what the engine resolved, and where its start-up spent its time."""
    startup = {name: round(seconds, 3) for name, seconds in llm.startup_timer.as_dict().items()}
    return {**llm.describe(), "startup": startup}


def read_bytes(llm: Any) -> int:
    """Returns the bytes of the weights that every step reads: without tables whose rows are looked up."""
    formats = llm.describe()["weight_formats"]
    return sum(one["num_bytes"] for one in formats if one["product"] != LOOKED_UP)


def checked(output: Any) -> Any:
    if output.error is not None:
        raise RuntimeError(f"request {output.request_id}: {output.error}")
    return output


def _device_calls(llm: Any) -> Calls:
    """Whole calls, without the times of steps."""
    from ratoon import BeamSearchParams, SamplingParams

    parents: list[Any] = []

    def params(num_tokens: int) -> Any:
        return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)

    def beam_searches(prompts: TokenIds, width: int, num_tokens: int) -> list[TokenIds]:
        search = BeamSearchParams(beam_width=width, n=width, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.beam_search(prompts, search, progress=False)
        return [[list(choice.token_ids) for choice in checked(output).outputs] for output in outputs]

    def keep(prompt: list[int], num_tokens: int) -> list[int]:
        """Generates with a lease: what `continue_kept` goes on from."""
        for parent in parents:
            llm.forget(parent.request_id)
        parents[:] = llm.generate([prompt], params(num_tokens), progress=False, retain_kv=LEASE_SECONDS)
        return list(checked(parents[0]).outputs[0].token_ids)

    def continue_kept(suffix: list[int], num_tokens: int) -> list[int]:
        output = llm.generate_continuation(parents[0], suffix, params(num_tokens))
        assert output.continuation is not None and output.continuation.inherited_tokens, output.continuation
        return list(checked(output).outputs[0].token_ids)

    return {"beam_searches": beam_searches, "keep": keep, "continue_kept": continue_kept}


def has_tokenizer(model: Path) -> bool:
    """A folder of random weights may have none."""
    return model.is_file() or (model / "tokenizer.json").exists()


def _searches(llm: Any, known: Known) -> Calls:
    from ratoon.benchmarks.two_stage.stage import Send, StageRunner
    from ratoon.benchmarks.two_stage.stage import beam_search as search_params
    from ratoon.core.params import RequestOutputKind, SamplingParams

    stages = StageRunner(llm)

    def greedy(num_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
        )

    def run(send: Send) -> dict[str, Any]:
        (answer,) = stages.run([send])
        continuation = answer.output.continuation
        return {
            "token_ids": [list(choice.token_ids) for choice in answer.output.outputs],
            "times": answer.times,  # since the request was sent, after each step
            "inherited_tokens": None if continuation is None else continuation.inherited_tokens,
        }

    def decode(prompt: list[int], num_tokens: int) -> dict[str, Any]:
        return run(Send(prompt, greedy(num_tokens)))

    def beam_search(prompt: list[int], width: int, num_tokens: int) -> dict[str, Any]:
        return run(Send(prompt, search_params(width, num_tokens)))

    def prepare(prompt: list[int]) -> list[int]:
        """One token more than the prompt is known then: the one that was generated."""
        llm.reset_prefix_cache()  # and the parent before goes
        (answer,) = stages.run([Send(prompt, greedy(1), retain_kv=LEASE_SECONDS)])
        known.parent = answer.output
        return [*prompt, *answer.output.outputs[0].token_ids]

    def search_behind(suffix: list[int], width: int, num_tokens: int) -> dict[str, Any]:
        return run(Send(suffix, search_params(width, num_tokens), parent=known.parent))

    def decode_behind(suffix: list[int], num_tokens: int) -> dict[str, Any]:
        return run(Send(suffix, greedy(num_tokens), parent=known.parent))

    return {
        "decode": decode,
        "beam_search": beam_search,
        "prepare": prepare,
        "search_behind": search_behind,
        "decode_behind": decode_behind,
    }


if __name__ == "__main__":
    serve(load, ("ratoon", "torch", "triton"))
