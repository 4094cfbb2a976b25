"""Small random encoders, and models with a head that classifies, of transformers, saved as folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.golden.tiny_models import MAX_POSITION, VOCAB_SIZE

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 4,
}  # fmt: skip
DECODER = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": MAX_POSITION, "pad_token_id": 0}


def _bert(**more: Any) -> Any:
    return transformers.BertConfig(**SIZES, max_position_embeddings=MAX_POSITION, **more)


def _roberta(**more: Any) -> Any:
    sizes = SIZES | {"max_position_embeddings": MAX_POSITION + 2, "type_vocab_size": 1, "pad_token_id": 1}
    return transformers.RobertaConfig(**sizes, **more)


def _xlm_roberta(**more: Any) -> Any:
    sizes = SIZES | {"max_position_embeddings": MAX_POSITION + 6, "type_vocab_size": 1, "pad_token_id": 5}
    return transformers.XLMRobertaConfig(**sizes, **more)


def _distilbert(**more: Any) -> Any:
    return transformers.DistilBertConfig(
        vocab_size=VOCAB_SIZE, dim=64, hidden_dim=112, n_layers=3, n_heads=4, max_position_embeddings=MAX_POSITION,
        **more,
    )  # fmt: skip


def _modernbert(**more: Any) -> Any:
    """Its windows are narrower than most of the prompts."""
    tokens = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
    return transformers.ModernBertConfig(
        **SIZES, max_position_embeddings=MAX_POSITION, local_attention=14, **tokens, **more
    )


def _llama(**more: Any) -> Any:
    return transformers.LlamaConfig(**DECODER, **more)


def _qwen2(**more: Any) -> Any:
    return transformers.Qwen2Config(**DECODER, **more)


def _qwen3(**more: Any) -> Any:
    return transformers.Qwen3Config(**DECODER, head_dim=24, **more)


CONFIGS: dict[str, Callable[..., Any]] = {
    "Bert": _bert, "Roberta": _roberta, "XLMRoberta": _xlm_roberta, "DistilBert": _distilbert,
    "ModernBert": _modernbert, "Llama": _llama, "Qwen2": _qwen2, "Qwen3": _qwen3,
}  # fmt: skip
ENCODERS = [name for name in CONFIGS if name.endswith(("Bert", "berta", "Roberta"))]


def make_model(architecture: str, seed: int = 0, gain: float = 4.0, **more: Any) -> Any:
    """The random model of transformers with this class name, whose numbers are large enough for faults to be seen."""
    family = next(name for name in sorted(CONFIGS, key=len, reverse=True) if architecture.startswith(name))
    config = CONFIGS[family](**more)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2) if parameter.ndim == 1 else parameter.mul_(gain)
    return model


def save_model(folder: Path, architecture: str, **more: Any) -> Any:
    model = make_model(architecture, **more)
    model.save_pretrained(folder)
    return model
