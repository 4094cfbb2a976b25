"""transformers reading images: its processor and `generate`, one request after the other.

The processor runs in `take`, so that its time is not in that of `answer`.
"""

from __future__ import annotations

import argparse
from typing import Any

from peers.images import Question, make_picture
from peers.protocol import Calls, TokenIds, serve


def load(args: argparse.Namespace) -> Calls:
    import torch
    from transformers import AutoConfig, AutoImageProcessor, Qwen2_5_VLForConditionalGeneration

    torch.set_num_threads(args.threads)
    kind: Any = Qwen2_5_VLForConditionalGeneration
    model = kind.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None  # never stops early
    model.generation_config.pad_token_id = 0  # unused, but it warns without one
    processor: Any = AutoImageProcessor.from_pretrained(args.model)
    image_token = AutoConfig.from_pretrained(args.model).image_token_id
    taken: list[dict[str, Any]] = []

    def take(asked: list[Question]) -> None:
        taken[:] = [inputs_of(question) for question in asked]

    def inputs_of(question: Question) -> dict[str, Any]:
        picture = make_picture(question["picture"], question["side"])
        found = processor(images=[picture], return_tensors="pt")
        num_rows = int(found.image_grid_thw.prod()) // processor.merge_size**2
        input_ids = torch.tensor([[*question["before"], *[image_token] * num_rows, *question["after"]]])
        pixels = {"pixel_values": found.pixel_values, "image_grid_thw": found.image_grid_thw}
        types = {"mm_token_type_ids": (input_ids == image_token).int()}  # 1: an image
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), **pixels, **types}

    def answer(num_tokens: int) -> TokenIds:
        with torch.inference_mode():
            return [run(inputs, num_tokens) for inputs in taken]

    def run(inputs: dict[str, Any], num_tokens: int) -> list[int]:
        output = model.generate(**inputs, do_sample=False, max_new_tokens=num_tokens)
        tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens

    return {"take": take, "answer": answer}


if __name__ == "__main__":
    serve(load, ("transformers", "torch"))
