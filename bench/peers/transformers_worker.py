"""transformers' `generate`, and its hidden states. Prompts of a batch have one length, so nothing is padded."""

from __future__ import annotations

import argparse
import time
from typing import Any

from peers.protocol import Calls, TokenIds, serve


def load(args: argparse.Namespace) -> Calls:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    causal_lm = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    causal_lm.generation_config.eos_token_id = None  # never stops early
    causal_lm.generation_config.pad_token_id = 0  # unused, but it warns without one

    def generate(prompts: TokenIds, num_tokens: int, **options: Any) -> TokenIds:
        input_ids = torch.tensor(prompts)  # [requests, tokens]
        with torch.inference_mode():
            output = causal_lm.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                **options,
            )
        return output[:, input_ids.shape[1] :].tolist()

    def beam_search(prompt: list[int], width: int, num_tokens: int) -> dict[str, Any]:
        return {"token_ids": generate([prompt], num_tokens, num_beams=width, num_return_sequences=width)}

    def hidden_states(prompt: list[int]) -> dict[str, Any]:
        """Of all layers, as it always is there. The model without its head and without a cache: the least it can do."""
        begin = time.perf_counter()
        with torch.inference_mode():
            found = causal_lm.model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states
        seconds = time.perf_counter() - begin
        states = found[-1][0]  # [tokens, hidden], behind the final norm
        return {"seconds": seconds, "last": states[-1].tolist(), "mean": states.mean(0).tolist()}

    return {"generate": generate, "beam_search": beam_search, "hidden_states": hidden_states}


if __name__ == "__main__":
    serve(load, ("transformers", "torch"))
