"""transformers' `generate`, and its hidden states. Prompts of a batch have one length, so nothing is padded. A model
with an encoder reads them there, and its decoder begins with what the model's config says. The settings may name
another implementation of attention (`attn_implementation`) than torch's, which some models can't use.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from peers.protocol import Calls, TokenIds, serve


def load(args: argparse.Namespace) -> Calls:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    torch.set_num_threads(args.threads)
    has_encoder = AutoConfig.from_pretrained(args.model).is_encoder_decoder
    kind: Any = AutoModelForSeq2SeqLM if has_encoder else AutoModelForCausalLM
    attention = args.settings.get("attn_implementation", "sdpa")
    model = kind.from_pretrained(args.model, dtype=torch.float32, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None  # never stops early
    model.generation_config.pad_token_id = 0  # unused, but it warns without one

    def generate(prompts: TokenIds, num_tokens: int, **options: Any) -> TokenIds:
        input_ids = torch.tensor(prompts)  # [requests, tokens]
        with torch.inference_mode():
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                **options,
            )
        num_before = 1 if has_encoder else input_ids.shape[1]  # the decoder's start token, or the prompt
        return output[:, num_before:].tolist()

    def beam_search(prompt: list[int], width: int, num_tokens: int) -> dict[str, Any]:
        return {"token_ids": generate([prompt], num_tokens, num_beams=width, num_return_sequences=width)}

    def hidden_states(prompt: list[int]) -> dict[str, Any]:
        """Of all layers, as it always is there. The model without its head and without a cache: the least it can do."""
        begin = time.perf_counter()
        with torch.inference_mode():
            found = model.model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states
        seconds = time.perf_counter() - begin
        states = found[-1][0]  # [tokens, hidden], after the final norm
        return {"seconds": seconds, "last": states[-1].tolist(), "mean": states.mean(0).tolist()}

    return {"generate": generate, "beam_search": beam_search, "hidden_states": hidden_states}


if __name__ == "__main__":
    serve(load, ("transformers", "torch"))
