"""vLLM reading images, through its LLM class, from the picture to tokens."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from peers.images import Question, make_picture
from peers.protocol import Calls, TokenIds, serve


def load(args: argparse.Namespace) -> Calls:
    from PIL import Image
    from vllm import LLM, SamplingParams

    settings = {"max_model_len": args.max_model_len, "seed": 0, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    llm = LLM(model=args.model, **{**settings, **args.settings})
    image_token = json.loads((Path(args.model) / "config.json").read_text(encoding="utf-8"))["image_token_id"]
    taken: list[dict[str, Any]] = []

    def take(asked: list[Question]) -> None:
        taken[:] = [prompt_of(question) for question in asked]

    def prompt_of(question: Question) -> dict[str, Any]:
        picture = Image.fromarray(make_picture(question["picture"], question["side"]))
        token_ids = [*question["before"], image_token, *question["after"]]
        return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": picture}}

    def answer(num_tokens: int) -> TokenIds:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate(taken, [params] * len(taken), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return {"take": take, "answer": answer}


if __name__ == "__main__":
    serve(load, ("vllm", "torch"))
