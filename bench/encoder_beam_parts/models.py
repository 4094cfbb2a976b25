"""Models of a family's usual shape with random weights, as Hugging Face folders. Only their speed means something.

Nothing is forced in their answers, and no token ends them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

SEED = 0
LAST_NORM_STD = 3.0  # large enough that some tokens are clearly the more probable ones
# By family: the name, and what transformers' config calls the sizes.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": (
        "bart-base",
        {"vocab_size": 50265, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
         "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
         "max_position_embeddings": 1024},
    ),
    "t5": (
        "t5-small",
        {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": 6,
         "num_heads": 8, "decoder_start_token_id": 0},
    ),
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "bart": {"vocab_size": 97, "d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 64},
    "t5": {"vocab_size": 97, "d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2,
           "num_heads": 2, "decoder_start_token_id": 0},
}  # fmt: skip


def make_model(family: str, full: bool, cache: Path) -> Path:
    """The folder, made if it is not there. It appears in one moment and complete, or not at all."""
    name, shape = SHAPES[family] if full else (f"tiny-{family}", TINY[family])
    recipe = json.dumps([shape, SEED, LAST_NORM_STD])  # by which a folder is known: another one makes another
    folder = cache / f"{name}-random-{hashlib.blake2b(recipe.encode(), digest_size=4).hexdigest()}"
    if (folder / "config.json").is_file():
        return folder
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _random_model(family, shape).save_pretrained(partial)
    partial.rename(folder)
    return folder


def vocab_size(family: str, full: bool) -> int:
    size: int = (SHAPES[family][1] if full else TINY[family])["vocab_size"]
    return size


def _random_model(family: str, shape: dict[str, Any]) -> Any:
    import torch
    import transformers

    torch.manual_seed(SEED)
    model: Any
    if family == "bart":
        model = transformers.BartForConditionalGeneration(transformers.BartConfig(**shape, forced_eos_token_id=None))
        last_norm = model.model.decoder.layers[-1].final_layer_norm
    else:
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape))
        last_norm = model.decoder.final_layer_norm
    # Head and embedding are one: with a norm of ones, a token is followed by itself, whatever the encoder has read.
    torch.nn.init.normal_(last_norm.weight, std=LAST_NORM_STD)
    return model
