"""llama.cpp through llama-cpp-python's own loop, with its prompt lookup (`lookup_tokens` above 0) or without.

A draft is what followed the last tokens where they occurred before in the request's own text.
"""

from __future__ import annotations

import argparse
from itertools import islice

from peers.protocol import Calls, TokenIds, serve


def load(args: argparse.Namespace) -> Calls:
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    num_tokens = args.settings["lookup_tokens"]
    draft = LlamaPromptLookupDecoding(num_pred_tokens=num_tokens) if num_tokens else None
    llm = llama_cpp.Llama(
        args.model,
        n_ctx=args.max_model_len,
        n_batch=2048,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        logits_all=draft is not None,
        draft_model=draft,
        verbose=False,
    )

    def generate(prompts: TokenIds, num_tokens: int) -> TokenIds:
        """One prompt after the other. What the one before had in common with it stays in memory."""
        return [list(islice(llm.generate(prompt, temp=0.0), num_tokens)) for prompt in prompts]

    return {"generate": generate}


if __name__ == "__main__":
    serve(load, ("llama-cpp-python",))
