"""CTranslate2. Its models have a format of their own (ctranslate2_convert.py).

What it can keep between two calls is one static prompt, which the caller names each time.
"""

from __future__ import annotations

import argparse
from typing import Any

from peers.ctranslate2_options import Vocabulary, model_options
from peers.protocol import Calls, TokenIds, serve


def load(args: argparse.Namespace) -> Calls:
    import ctranslate2

    generator = ctranslate2.Generator(args.model, **model_options(args))
    vocabulary = Vocabulary(args.model, "vocabulary.json")
    static: dict[str, Any] = {}

    def search(prompts: TokenIds, width: int, num_tokens: int, **options: Any) -> list[TokenIds]:
        results = generator.generate_batch(
            vocabulary.texts(prompts),
            max_length=num_tokens,
            min_length=num_tokens,
            beam_size=width,
            num_hypotheses=width,
            end_token=[],  # never stops early
            include_prompt_in_result=False,
            max_batch_size=0,  # all at once
            **options,
        )
        return [result.sequences_ids for result in results]

    def generate(prompts: TokenIds, num_tokens: int) -> TokenIds:
        return [beams[0] for beams in search(prompts, 1, num_tokens)]

    def beam_search(prompt: list[int], width: int, num_tokens: int) -> dict[str, Any]:
        return {"token_ids": search([prompt], width, num_tokens)[0]}

    def prepare(prompt: list[int]) -> list[int]:
        static.update(static_prompt=vocabulary.texts([prompt])[0], cache_static_prompt=True)
        search([prompt[-1:]], 1, 1, **static)  # some text after it, so that it is computed
        return prompt

    def search_behind(suffix: list[int], width: int, num_tokens: int) -> dict[str, Any]:
        return {"token_ids": search([suffix], width, num_tokens, **static)[0]}

    return {"generate": generate, "beam_search": beam_search, "prepare": prepare, "search_behind": search_behind}


if __name__ == "__main__":
    serve(load, ("ctranslate2",))
