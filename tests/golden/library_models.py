"""Small random decoders of the Transformers library, most of them of families that are not native."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.golden.engines import write_word_tokenizer
from tests.golden.tiny_models import MAX_POSITION, VOCAB_SIZE

SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
TWO_KINDS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Class, model_type, and what differs. Each stands for something that the backend finds out for itself.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "opt": (
        "OPTForCausalLM",
        "opt",
        {"ffn_dim": 112, "word_embed_proj_dim": 64, "pad_token_id": 0},
    ),  # learned positions
    "stablelm": ("StableLmForCausalLM", "stablelm", {}),  # a part of each head is rotated
    "cohere": ("CohereForCausalLM", "cohere", {"logit_scale": 0.5}),  # tied; logits are scaled
    "cohere2": ("Cohere2ForCausalLM", "cohere2", TWO_KINDS),  # windows; no rotation in the other layers
    "phi": ("PhiForCausalLM", "phi", {}),  # halves side by side; biases, one of the head among them
    "exaone4": ("Exaone4ForCausalLM", "exaone4", TWO_KINDS),
    "ernie4.5": ("Ernie4_5ForCausalLM", "ernie4_5", {"head_dim": 16}),
    "helium": ("HeliumForCausalLM", "helium", {"head_dim": 16}),
    "arcee": ("ArceeForCausalLM", "arcee", {}),
    "gemma": ("GemmaForCausalLM", "gemma", {"head_dim": 16}),  # embeddings are scaled by their module
    "vaultgemma": ("VaultGemmaForCausalLM", "vaultgemma", {"head_dim": 16, **TWO_KINDS}),  # soft caps
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe", EXPERTS),  # experts under other names in files
    "phimoe": ("PhimoeForCausalLM", "phimoe", EXPERTS),  # experts apart in files, stacked in the module
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "gpt_bigcode", {}),  # one key-value head
    # Latent attention: values are narrower than keys
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "num_key_value_heads": 4,
        },
    ),
    "gpt_oss": ("GptOssForCausalLM", "gpt_oss", {"head_dim": 16, **EXPERTS, **TWO_KINDS}),  # sinks
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {"head_dim": 16}),
    "gpt2": ("GPT2LMHeadModel", "gpt2", {"n_inner": 112}),  # weights that are transposed
}


@functools.cache
def library_model(name: str) -> Any:
    architecture, model_type, changes = MODELS[name]
    config = transformers.CONFIG_MAPPING[model_type](**{**SHARED, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    oracle = getattr(transformers, architecture)(config).eval()
    # A fresh model has unit norms, zero biases and tiny weights: an error in any of them would not be seen.
    with torch.no_grad():
        for parameter in oracle.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(4.0)
    oracle.generation_config.eos_token_id = None  # the engine gets ignore_eos
    return oracle


@functools.cache
def _saved() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ratoon-library-")  # removed when the process ends


@functools.cache
def library_folder(name: str) -> Path:
    folder = Path(_saved().name) / name
    library_model(name).save_pretrained(folder)
    write_word_tokenizer(folder)
    return folder


@torch.inference_mode()
def oracle_logprobs(name: str, token_ids: Sequence[int]) -> torch.Tensor:
    """[T, V] of a text."""
    logits: torch.Tensor = library_model(name)(torch.tensor([list(token_ids)]), use_cache=False).logits
    return logits[0].float().log_softmax(-1)


@functools.cache
@torch.inference_mode()
def _greedy(name: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    found = library_model(name).generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
        max_new_tokens=count, pad_token_id=0,
    )  # fmt: skip
    return tuple(found[0, len(prompt) :].tolist())


def greedy_tokens(name: str, prompt: Sequence[int], count: int) -> list[int]:
    return list(_greedy(name, tuple(prompt), count))


@torch.inference_mode()
def library_states(name: str, token_ids: Sequence[int]) -> torch.Tensor:
    """[L + 1, T, H] as the library lists them: before each layer, and behind the final norm."""
    found = library_model(name)(torch.tensor([list(token_ids)]), use_cache=False, output_hidden_states=True)
    return torch.cat(found.hidden_states).float()
