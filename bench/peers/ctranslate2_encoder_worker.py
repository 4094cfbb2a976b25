"""CTranslate2 with an encoder-decoder model: prompts are read by the encoder, and the decoder begins with what the
model's config says."""

from __future__ import annotations

import argparse
from typing import Any

from peers.ctranslate2_options import Vocabulary, model_options
from peers.protocol import Calls, TokenIds, serve


def load(args: argparse.Namespace) -> Calls:
    import ctranslate2

    translator = ctranslate2.Translator(args.model, **model_options(args))
    vocabulary = Vocabulary(args.model, "shared_vocabulary.json")

    def search(prompts: TokenIds, width: int, least: int, most: int) -> list[TokenIds]:
        results = translator.translate_batch(
            vocabulary.texts(prompts),
            beam_size=width,
            num_hypotheses=width,
            min_decoding_length=least,
            max_decoding_length=most,
            length_penalty=0,
            max_batch_size=0,  # all at once
        )
        return [[vocabulary.ids(texts) for texts in result.hypotheses] for result in results]

    def generate(prompts: TokenIds, num_tokens: int) -> TokenIds:
        return [texts[0] for texts in search(prompts, 1, num_tokens, num_tokens)]

    def answer(prompts: TokenIds, most_tokens: int) -> TokenIds:
        return [texts[0] for texts in search(prompts, 1, 0, most_tokens)]

    def beam_search(prompt: list[int], width: int, num_tokens: int) -> dict[str, Any]:
        return {"token_ids": search([prompt], width, num_tokens, num_tokens)[0]}

    return {"generate": generate, "answer": answer, "beam_search": beam_search}


if __name__ == "__main__":
    serve(load, ("ctranslate2",))
