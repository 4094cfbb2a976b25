"""Draft heads with random weights, and what they guess by a plain computation in torch without caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch.nn import functional

from ratoon.core.config import ModelConfig
from tests.golden.tiny_models import TinyModel

Tensor = torch.Tensor

HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, EPS = 4, 2, 16, 48, 1e-5
LAYERS = (0, 1)  # whose outputs an EAGLE-3 head reads here


class RandomHead(NamedTuple):
    kind: str
    raw_config: dict[str, Any]
    tensors: dict[str, Tensor]

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.raw_config))
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors")
        return folder


def random_head(kind: str, target: ModelConfig, seed: int = 0, draft_vocab: int | None = None) -> RandomHead:
    """With sizes of its own where its kind allows it."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    size, vocab = target.hidden_size, target.vocab_size
    layer = {
        "self_attn.q_proj.weight": numbers(HEADS * HEAD_DIM, 2 * size if kind == "eagle3" else size),
        "self_attn.k_proj.weight": numbers(KV_HEADS * HEAD_DIM, 2 * size if kind == "eagle3" else size),
        "self_attn.v_proj.weight": numbers(KV_HEADS * HEAD_DIM, 2 * size if kind == "eagle3" else size),
        "self_attn.o_proj.weight": numbers(size, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": numbers(INTERMEDIATE, size),
        "mlp.up_proj.weight": numbers(INTERMEDIATE, size),
        "mlp.down_proj.weight": numbers(size, INTERMEDIATE),
        "input_layernorm.weight": 1 + numbers(size),
        "post_attention_layernorm.weight": 1 + numbers(size),
    }
    raw = {
        "architectures": ["LlamaForCausalLMEagle3" if kind == "eagle3" else "LlamaMTPModel"],
        "hidden_size": size, "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 1, "rms_norm_eps": EPS,
        "vocab_size": vocab, "max_position_embeddings": 64, "torch_dtype": "float32",
    }  # fmt: skip
    if kind == "mtp":
        place = f"model.layers.{target.num_layers}."
        tensors = {place + name: tensor for name, tensor in layer.items()}
        tensors |= {
            place + "enorm.weight": 1 + numbers(size),
            place + "hnorm.weight": 1 + numbers(size),
            place + "eh_proj.weight": numbers(size, 2 * size),
            place + "shared_head.norm.weight": 1 + numbers(size),
            place + "embed_tokens.weight": numbers(vocab, size),
        }
        return RandomHead(kind, raw, tensors)
    tensors = {f"midlayer.{name}": tensor for name, tensor in layer.items()}
    tensors |= {
        "midlayer.hidden_norm.weight": 1 + numbers(size),
        "fc.weight": numbers(size, len(LAYERS) * size),
        "norm.weight": 1 + numbers(size),
        "lm_head.weight": numbers(draft_vocab or vocab, size),
    }
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}
    if draft_vocab is not None:
        kept = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        raw["draft_vocab_size"] = draft_vocab
        tensors["d2t"] = kept - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True)
    return RandomHead(kind, raw, tensors)


@torch.inference_mode()
def guesses(head: RandomHead, tiny: TinyModel, token_ids: list[int], count: int) -> list[int]:
    """The tokens that the head guesses behind this text, one after the other."""
    output = tiny.oracle(torch.tensor([token_ids[:-1]]), use_cache=False, output_hidden_states=True)
    states = [one[0].float() for one in output.hidden_states]  # embeddings, then the output of each layer [T, H]
    weights = {
        name.removeprefix(f"model.layers.{tiny.config.num_layers}."): tensor for name, tensor in head.tensors.items()
    }
    weights = {name.removeprefix("midlayer."): tensor for name, tensor in weights.items()}
    table = weights.get("embed_tokens.weight", tiny.source.tensors["model.embed_tokens.weight"])
    if head.kind == "eagle3":
        hidden = torch.cat([states[layer + 1] for layer in LAYERS], dim=-1) @ weights["fc.weight"].T
    else:
        hidden = states[-1]  # behind the last norm
    tokens, found = list(token_ids), []
    for _ in range(count):
        embedded = table[torch.tensor(tokens[1:])].float()
        stream, normed = _layer(head.kind, weights, embedded, hidden)
        if head.kind == "eagle3":
            token = int((normed[-1] @ weights["lm_head.weight"].T).argmax())
            token += int(weights["d2t"][token]) if "d2t" in weights else 0
        else:
            token = int((normed[-1] @ tiny.source.tensors["lm_head.weight"].T).argmax())
        tokens.append(token)
        found.append(token)
        hidden = torch.cat([hidden, stream[-1:]])
    return found


def _layer(kind: str, weights: dict[str, Tensor], embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """All rows at once: the stream [T, H] and its norm."""
    if kind == "eagle3":
        inputs = torch.cat(
            [_norm(embedded, weights["input_layernorm.weight"]), _norm(hidden, weights["hidden_norm.weight"])], dim=-1
        )
        stream = hidden
    else:
        both = [_norm(embedded, weights["enorm.weight"]), _norm(hidden, weights["hnorm.weight"])]
        stream = torch.cat(both, dim=-1) @ weights["eh_proj.weight"].T
        inputs = _norm(stream, weights["input_layernorm.weight"])
    stream = stream + _attention(weights, inputs) @ weights["self_attn.o_proj.weight"].T
    x = _norm(stream, weights["post_attention_layernorm.weight"])
    gate = functional.silu(x @ weights["mlp.gate_proj.weight"].T) * (x @ weights["mlp.up_proj.weight"].T)
    stream = stream + gate @ weights["mlp.down_proj.weight"].T
    return stream, _norm(stream, weights["norm.weight" if kind == "eagle3" else "shared_head.norm.weight"])


def _attention(weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
    def heads(name: str, count: int) -> Tensor:
        return (
            (inputs @ weights[f"self_attn.{name}.weight"].T).view(-1, count, HEAD_DIM).transpose(0, 1)
        )  # [heads, T, D]

    q, k, v = _rotate(heads("q_proj", HEADS)), _rotate(heads("k_proj", KV_HEADS)), heads("v_proj", KV_HEADS)
    k, v = (one.repeat_interleave(HEADS // KV_HEADS, dim=0) for one in (k, v))
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attended.transpose(0, 1).reshape(len(inputs), HEADS * HEAD_DIM)


def _rotate(x: Tensor) -> Tensor:
    """[heads, T, D] by the positions 0 to T - 1."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(x.shape[1])[:, None] * frequencies  # [T, D / 2]
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
