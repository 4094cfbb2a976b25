"""Ratoon on a GPU, through its LLM class, with random weights. The calls are those of vllm_gpu_worker.py, and
continuations of leased requests."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from peers.protocol import Calls, TokenIds, serve

LEASE_SECONDS = 600


def load(args: argparse.Namespace) -> Calls:
    from ratoon import LLM, BeamSearchParams, SamplingParams

    settings = {
        "load_format": "dummy",
        "max_model_len": args.max_model_len,
        "skip_tokenizer": not (Path(args.model) / "tokenizer.json").exists(),
        **args.settings,
    }
    llm = LLM(args.model, **settings)

    def params(num_tokens: int, temperature: float = 0.0) -> Any:
        return SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, detokenize=False)

    def generate(prompts: TokenIds, num_tokens: int | list[int], temperature: float = 0.0) -> TokenIds:
        lengths = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
        outputs = llm.generate(prompts, [params(length, temperature) for length in lengths], progress=False)
        return [new_tokens(output) for output in outputs]

    def beam_search(prompts: TokenIds, width: int, num_tokens: int) -> list[TokenIds]:
        search = BeamSearchParams(beam_width=width, n=width, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.beam_search(prompts, search, progress=False)
        return [[list(choice.token_ids) for choice in checked(output).outputs] for output in outputs]

    parents: list[Any] = []

    def keep(prompt: list[int], num_tokens: int) -> list[int]:
        """Generate with a lease: what `continue_kept` goes on from."""
        for parent in parents:
            llm.forget(parent.request_id)
        parents[:] = llm.generate([prompt], params(num_tokens), progress=False, retain_kv=LEASE_SECONDS)
        return new_tokens(parents[0])

    def continue_kept(suffix: list[int], num_tokens: int) -> list[int]:
        output = llm.generate_continuation(parents[0], suffix, params(num_tokens))
        assert output.continuation is not None and output.continuation.inherited_tokens, output.continuation
        return new_tokens(output)

    def describe() -> dict[str, Any]:
        """What the engine resolved, and where its start-up spent its time."""
        startup = {name: round(seconds, 3) for name, seconds in llm.startup_timer.as_dict().items()}
        return {**llm.describe(), "startup": startup}

    return {
        "generate": generate,
        "beam_search": beam_search,
        "keep": keep,
        "continue_kept": continue_kept,
        "describe": describe,
    }


def checked(output: Any) -> Any:
    if output.error is not None:
        raise RuntimeError(f"request {output.request_id}: {output.error}")
    return output


def new_tokens(output: Any) -> list[int]:
    return list(checked(output).outputs[0].token_ids)


if __name__ == "__main__":
    serve(load, ("ratoon", "torch", "triton"))
