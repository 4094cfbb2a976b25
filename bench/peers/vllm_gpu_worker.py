"""vLLM on a GPU, through its LLM class, with random weights.

generate(prompts, num_tokens, temperature)   num_tokens: for all prompts, or a list with one for each
beam_search(prompts, width, num_tokens)      the tokens of all beams of each prompt
"""

from __future__ import annotations

import argparse
from typing import Any

from peers.protocol import MAX_BEAM_WIDTH, Calls, TokenIds, serve


def load(args: argparse.Namespace) -> Calls:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import BeamSearchParams

    settings = {
        "load_format": "dummy",
        "max_model_len": args.max_model_len,
        "max_logprobs": 2 * MAX_BEAM_WIDTH,  # its beam search asks for twice as many as there are beams
        "seed": 0,
        **args.settings,
    }
    llm = LLM(model=args.model, **settings)

    def params(num_tokens: int, temperature: float) -> Any:
        return SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, detokenize=False)

    def inputs(prompts: TokenIds) -> list[Any]:
        return [{"prompt_token_ids": prompt} for prompt in prompts]

    def generate(prompts: TokenIds, num_tokens: int | list[int], temperature: float = 0.0) -> TokenIds:
        lengths = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
        outputs = llm.generate(inputs(prompts), [params(length, temperature) for length in lengths], use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def beam_search(prompts: TokenIds, width: int, num_tokens: int) -> list[TokenIds]:
        search = BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True)
        outputs = llm.beam_search(inputs(prompts), search)
        return [
            [list(sequence.tokens[len(prompt) :]) for sequence in output.sequences]
            for prompt, output in zip(prompts, outputs)
        ]

    return {"generate": generate, "beam_search": beam_search}


if __name__ == "__main__":  # vLLM starts its engine process by importing this file again
    serve(load, ("vllm", "torch", "triton"))
