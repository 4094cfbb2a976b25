"""Ratoon reading images, through its LLM class, from the picture to tokens.

It runs on the CPU unless the settings name a device. It has three calls more: `num_encoder_runs()`, of pictures since
the start, `prepare()`, all that is done with what was taken before the model sees it, and `generate` of text alone.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from peers.images import Question, make_picture
from peers.protocol import Calls, TokenIds, serve


def load(args: argparse.Namespace) -> Calls:
    from ratoon import LLM, SamplingParams

    settings = {"skip_tokenizer": True, "max_model_len": args.max_model_len}
    if "device" not in args.settings:
        settings |= {"device": "cpu", "dtype": "float32", "num_threads": args.threads, "kv_memory": "1GiB"}
    llm = LLM(args.model, **{**settings, **args.settings})
    media = llm.source.config.media
    taken: list[dict[str, Any]] = []

    def take(asked: list[Question]) -> None:
        taken[:] = [prompt_of(question) for question in asked]

    def prompt_of(question: Question) -> dict[str, Any]:
        assert media is not None
        picture = make_picture(question["picture"], question["side"])
        token_ids = [*question["before"], media.image_token_id, *question["after"]]
        return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": [picture]}}

    def answer(num_tokens: int) -> TokenIds:
        return generate(taken, num_tokens)

    def generate(prompts: list[Any], num_tokens: int) -> TokenIds:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, params, progress=False)
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def prepare() -> list[int]:
        with ThreadPoolExecutor(args.threads) as pool:
            return list(pool.map(llm.count_tokens, taken))

    calls: Calls = {"take": take, "answer": answer, "generate": generate, "prepare": prepare}
    return {**calls, "num_encoder_runs": lambda: llm.stats().num_encoder_runs}


if __name__ == "__main__":
    serve(load, ("ratoon", "torch"))
