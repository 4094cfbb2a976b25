"""Folders as DeepSeek publishes its models: 8-bit floats with a scale for each block of a weight. Weights are encoded
and decoded here by the format's definition, and transformers' model has the numbers that a folder stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from ratoon.models.expert_source import ExpertSource
from tests.golden.engines import write_word_tokenizer
from tests.golden.tiny_mixtures import with_choice_bias
from tests.golden.tiny_models import VOCAB_SIZE, DictSource, TinyModel, plain_config

Tensor = torch.Tensor

BLOCK = 128
LARGEST = 448.0  # of e4m3
QUANTISED = {
    "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic",
}  # fmt: skip
# Layers that DeepSeek's files have in 8 bits; routers, norms, the table and the head are floats.
LINEAR = (
    "q_a_proj",
    "q_b_proj",
    "q_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


class Encoded(NamedTuple):
    numbers: Tensor  # [out, in] float8_e4m3fn
    scales: Tensor  # [ceil(out / 128), ceil(in / 128)] float32


def encode(weight: Tensor, block: int = BLOCK) -> Encoded:
    """The largest number of a block becomes the largest of the format."""
    rows, columns = (-(-size // block) for size in weight.shape)
    scales, numbers = torch.empty(rows, columns), torch.empty(weight.shape)
    for row in range(rows):
        for column in range(columns):
            place = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
            scales[row, column] = weight[place].abs().max() / LARGEST
            numbers[place] = weight[place] / scales[row, column]
    return Encoded(numbers.to(torch.float8_e4m3fn), scales)


def decode(encoded: Encoded, block: int = BLOCK) -> Tensor:
    """Byte by byte: a sign, four bits of exponent with a bias of 7, three bits behind the point. Exponent 0 has no 1 in
    front of the point."""
    codes = encoded.numbers.view(torch.uint8).numpy().astype(np.int64)
    sign, exponent, rest = 1 - 2 * (codes >> 7), codes >> 3 & 15, codes & 7
    sizes = np.where(exponent == 0, rest / 8 * 2.0**-6, (1 + rest / 8) * 2.0 ** (exponent - 7))
    scales = encoded.scales.double().numpy().repeat(block, 0).repeat(block, 1)[: codes.shape[0], : codes.shape[1]]
    return torch.from_numpy(sign * sizes * scales).float()


def large_deepseek_v3(seed: int = 0) -> TinyModel:
    """Weights of one to three blocks in each direction, the last of which is cut off. Its first layer is dense."""
    config = transformers.DeepseekV3Config(
        vocab_size=VOCAB_SIZE, hidden_size=160, intermediate_size=288, moe_intermediate_size=160, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        n_group=2, topk_group=1, norm_topk_prob=True, first_k_dense_replace=1, routed_scaling_factor=1.5,
        q_lora_rank=144, kv_lora_rank=144, qk_rope_head_dim=16, qk_nope_head_dim=40, v_head_dim=48,
        max_position_embeddings=256, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    oracle = transformers.DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2) if parameter.ndim == 1 else parameter.mul_(3)
    oracle.generation_config.eos_token_id = None
    tiny = TinyModel(oracle, plain_config("DeepseekV3ForCausalLM", 4, 1), DictSource(oracle.state_dict()))
    return with_choice_bias(tiny, seed)


def write_folder(folder: Path, tiny: TinyModel, **more: Tensor) -> None:
    """Writes the model in 8 bits, and gives its oracle the numbers that the folder stands for. `more`: tensors beside
    those of the model."""
    tiny.oracle.save_pretrained(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    write_word_tokenizer(folder)
    apart = ExpertSource(DictSource(tiny.oracle.state_dict()))
    tensors: dict[str, Tensor] = dict(more)
    numbers: dict[str, Tensor] = {}
    for name in apart.shapes():
        weight = apart.read(name).floats().clone()
        if not name.endswith(tuple(f"{layer}.weight" for layer in LINEAR)):
            tensors[name] = weight
            continue
        encoded = encode(weight)
        tensors |= {name: encoded.numbers, f"{name}_scale_inv": encoded.scales}
        numbers[name] = decode(encoded)
    _replace_weights(tiny.oracle, numbers)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": QUANTISED}
    (folder / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def _replace_weights(oracle: Any, numbers: dict[str, Tensor]) -> None:
    """Experts are one tensor of each layer in transformers."""
    left = dict(numbers)
    for name, parameter in oracle.named_parameters():
        if name in left:
            parameter.copy_(left.pop(name))
        elif ".experts." in name:
            parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            prefix = name.rpartition(".")[0]
            for expert in range(len(parameter)):
                parameter[expert] = torch.cat([left.pop(f"{prefix}.{expert}.{part}.weight") for part in parts])
    assert not left and numbers, "every weight has its place"
