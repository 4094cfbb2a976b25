"""Ratoon, through its LLM class; beam searches one level below it, where each step's time can be seen.

The model is a folder or a GGUF file. Hidden states are in ratoon_states.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from peers.protocol import Calls, TokenIds, serve
from peers.ratoon_states import Known, state_calls

LEASE_SECONDS = 3600


def load(args: argparse.Namespace) -> Calls:
    from ratoon import LLM, SamplingParams

    llm = LLM(
        args.model,
        device="cpu",
        dtype="float32",
        num_threads=args.threads,
        max_model_len=args.max_model_len,
        kv_memory="2GiB",  # what vLLM gets
        skip_tokenizer=not has_tokenizer(Path(args.model)),
        **args.settings,
    )

    def generate(prompts: TokenIds, num_tokens: int) -> TokenIds:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, params, progress=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def answer(prompts: TokenIds, most_tokens: int) -> TokenIds:
        params = SamplingParams(temperature=0.0, max_tokens=most_tokens, detokenize=False)
        outputs = llm.generate(prompts, params, progress=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    known = Known()
    facts = {"weight_bytes": lambda: llm.describe()["weight_bytes"]}
    return {"generate": generate, "answer": answer, **facts, **_searches(llm, known), **state_calls(llm, known)}


def has_tokenizer(model: Path) -> bool:
    """A folder of random weights may have none."""
    return model.is_file() or (model / "tokenizer.json").exists()


def _searches(llm: Any, known: Known) -> Calls:
    try:
        from ratoon.benchmarks.two_stage.stage import Send, StageRunner
        from ratoon.benchmarks.two_stage.stage import beam_search as search_params
    except ImportError:  # an earlier checkout has them there (`--before`)
        from ratoon.api.two_stage.experiment import beam_search as search_params
        from ratoon.api.two_stage.stage import Send, StageRunner
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
    serve(load, ("ratoon", "torch"))
