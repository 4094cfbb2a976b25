"""CTranslate2, in fp32 unless the settings have another compute_type. Its models have a format of their own
(ctranslate2_convert.py), its prompts are tokens as text.

What it can keep between two calls is one static prompt, which the caller names each time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from peers.protocol import Calls, TokenIds, serve


def load(args: argparse.Namespace) -> Calls:
    import ctranslate2

    generator = ctranslate2.Generator(
        args.model,
        device="cpu",
        compute_type=args.settings.get("compute_type", "float32"),
        inter_threads=1,
        intra_threads=args.threads,
    )
    vocabulary: list[str] = json.loads((Path(args.model) / "vocabulary.json").read_text(encoding="utf-8"))
    static: dict[str, Any] = {}

    def search(prompts: TokenIds, width: int, num_tokens: int, **options: Any) -> list[TokenIds]:
        results = generator.generate_batch(
            [[vocabulary[token] for token in prompt] for prompt in prompts],
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
        static.update(static_prompt=[vocabulary[token] for token in prompt], cache_static_prompt=True)
        search([prompt[-1:]], 1, 1, **static)  # some text after it, so that it is computed
        return prompt

    def search_behind(suffix: list[int], width: int, num_tokens: int) -> dict[str, Any]:
        return {"token_ids": search([suffix], width, num_tokens, **static)[0]}

    return {"generate": generate, "beam_search": beam_search, "prepare": prepare, "search_behind": search_behind}


if __name__ == "__main__":
    serve(load, ("ctranslate2",))
